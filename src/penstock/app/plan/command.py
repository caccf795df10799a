"""`penstock plan`: find a plan for a profile and a cluster, predict its step, and explain it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.app.plan.output import all_as_text, as_json, as_text
from penstock.app.plan.predict import predict
from penstock.app.plan.scorer import Scorer
from penstock.core.arguments import named, parameters_of, refuse_unknown
from penstock.core.cluster import Cluster
from penstock.core.cluster_file import read_cluster
from penstock.core.json_file import read_json
from penstock.core.profile import MOST_ROWS, Profile
from penstock.core.text_profile import read_text_profile
from penstock.core.validation import require_noun, require_path, whole
from penstock.errors import InputError
from penstock.planners.prediction import Prediction
from penstock.planners.registry import OPTIONS, PLANNERS, find_plan
from penstock.planners.scaled import scaled
from penstock.schedules.registry import find

NO_TIME = 1e-12  # seconds: a profile with less in all has no measured times


@named
def read_profile(path: str | Path, samples: int | None = None) -> Profile:
    """Read a profile from penstock's JSON, or from PipeDream's text, which does not contain the number of rows
    measured."""
    require_path(path)
    if Path(path).suffix != ".json":
        return read_text_profile(path, 1 if samples is None else whole("samples", samples))
    if samples is not None:
        raise InputError("samples with a text profile alone; JSON contains the number", samples, "leave it out")
    return read_json(path, "profile", Profile.from_json, "write it with `penstock profile`")


@named
def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    method: str = "search",
    batch: int | None = None,
    microbatch: int | None = None,
    **options: Any,
) -> Prediction:
    """Plan by a named method and simulate the plan. `batch` and `microbatch` count rows.

    By default a micro-batch is the one that was profiled (search may take larger ones), and a batch is four
    micro-batches for each device.
    """
    _require_options(options)
    refuse_unknown("plan", options, [*parameters_of(plan), *OPTIONS])
    require_noun(profile, Profile, "measure one with penstock.profile(), or read one: penstock.read_profile(path)")
    require_noun(cluster, Cluster, "read one: penstock.read_cluster(name or path)")
    sized = profile if microbatch is None else scaled(profile, whole("microbatch", microbatch, most=MOST_ROWS))
    spent = sum(layer.seconds for layer in sized.layers)
    if spent < NO_TIME:
        came = f"{spent:g} seconds in all"
        raise InputError("a profile in which some layer takes time", came, "measure or estimate it again")
    rows = sized.samples
    total = 4 * len(cluster.devices) * rows if batch is None else whole("batch", batch)
    if total % rows:
        raise InputError(f"a batch that is a multiple of the micro-batch of {rows} rows", total, "change either")
    if method == "search" and microbatch is not None:
        options.setdefault("fixed", True)
    judges = {"evaluate": Scorer(cluster), "confirm": Scorer(cluster, folding=False)}
    return predict(find_plan(sized, cluster, method, total // rows, judges, **options), cluster)


def _require_options(options: dict[str, Any]) -> None:
    """Refuse options that `plan` sets itself, and unknown schedules."""
    reserved = [name for name in ("microbatches", "judges") if name in options]
    if reserved:
        do = "leave it out: batch and microbatch, which count rows, determine the number of micro-batches"
        raise InputError("options of the method", ", ".join(reserved), do)
    if "schedule" in options:
        find(options["schedule"])


def plan_all(profile: Profile, cluster: Cluster, **given: Any) -> list[Prediction | InputError]:
    """Plan by every method, in the order of the table; an error takes the place of a plan.

    An option is passed to the methods that have it. Methods with asynchronous plans run only with `allow_async`.
    """
    own = {name for planner in PLANNERS.values() for name in planner.options}
    unknown = sorted(set(given) - own - {"batch", "microbatch"})
    if unknown:
        expected = f"batch, microbatch, or options that some method has ({', '.join(sorted(own))})"
        raise InputError(expected, ", ".join(unknown), "leave the others out")
    predictions: list[Prediction | InputError] = []
    for name, planner in PLANNERS.items():
        own_options = {word: value for word, value in given.items() if word not in own or word in planner.options}
        try:
            if planner.asynchronous and not given.get("allow_async", False):
                expected, advice = "allow_async for a method whose plans are asynchronous", "add --allow-async"
                raise InputError(expected, "none", f"{advice} (allow_async=True), or ask for {name} by name")
            predictions.append(plan(profile, cluster, method=name, **own_options))
        except InputError as error:
            predictions.append(error)
    return predictions


def plan_command(
    profile: str | Path,
    cluster: str | Path,
    method: str = "search",
    *,
    batch: int | None = None,
    microbatch: int | None = None,
    samples: int | None = None,
    hosts: int | None = None,
    json_wanted: bool = False,
    **options: Any,
) -> str:
    """Run the command; return the text to print. `options` are the method's own; None means that it was not given."""
    given, machines = read_profile(profile, samples), read_cluster(cluster, hosts)
    given_options = {name: value for name, value in options.items() if value is not None}
    if method != "all":
        prediction = plan(given, machines, method=method, batch=batch, microbatch=microbatch, **given_options)
        return json.dumps(as_json(prediction), indent=2, allow_nan=False) if json_wanted else as_text(prediction)
    every = dict(
        zip(PLANNERS, plan_all(given, machines, batch=batch, microbatch=microbatch, **given_options), strict=True)
    )
    if json_wanted:
        return json.dumps(
            [{"method": name, "refused": str(one)} if isinstance(one, InputError) else as_json(one)
             for name, one in every.items()], indent=2, allow_nan=False,
        )  # fmt: skip
    return all_as_text(every)
