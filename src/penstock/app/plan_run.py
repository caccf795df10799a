"""`penstock plan`: a profile and a cluster in, the plan, its predicted step and the reason out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.app.predict import Prediction, predict
from penstock.core.cluster import Cluster
from penstock.core.cluster_file import read_cluster
from penstock.core.given import whole
from penstock.core.profile import Profile
from penstock.core.text_profile import read_text_profile
from penstock.errors import FormatError, InputError
from penstock.planners.registry import PLANNERS, find_plan
from penstock.planners.scaled import scaled


def read_profile(path: str | Path, samples: int | None = None) -> Profile:
    """A profile from our JSON or from the literature's text, which does not say how many rows were measured."""
    if Path(path).suffix != ".json":
        return read_text_profile(path, 1 if samples is None else whole("samples", samples))
    try:
        return Profile.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise FormatError(str(path), "a readable profile", error.strerror, "check the path") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise FormatError(str(path), error.expected, error.came, error.do) from None
        raise FormatError(str(path), "JSON", str(error), "write it with `penstock profile`") from None


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    method: str = "dapple",
    batch: int | None = None,
    microbatch: int | None = None,
    **options: Any,
) -> Prediction:
    """Plan by a named method and simulate the answer. `batch` and `microbatch` count rows.

    Unless said otherwise a micro-batch is what was profiled, and a batch four of them for each device.
    """
    sized = profile if microbatch is None else scaled(profile, whole("microbatch", microbatch))
    rows = sized.samples
    total = 4 * len(cluster.devices) * rows if batch is None else whole("batch", batch)
    if total % rows:
        raise InputError(f"a batch that is a multiple of the micro-batch of {rows} rows", total, "change either")
    return predict(find_plan(sized, cluster, method, total // rows, **options), cluster)


def plan_all(profile: Profile, cluster: Cluster, **given: Any) -> list[Prediction | InputError]:
    """The same by every method, in the order of the table; a refusal takes the place of a plan."""
    found: list[Prediction | InputError] = []
    for name in PLANNERS:
        try:
            found.append(plan(profile, cluster, method=name, **given))
        except InputError as error:
            found.append(error)
    return found


def as_json(found: Prediction) -> dict[str, Any]:
    """What scripts read. `layers` count in the order of the profile, or of `order` where that is given."""
    layers = found.outcome.profile.layers
    return {
        "method": found.outcome.method,
        "schedule": found.plan.schedule,
        "microbatches": found.plan.microbatches,
        "rows": found.rows,
        "stages": [
            {
                "layers": [stage.first, stage.last],
                "names": [layers[stage.first].name, layers[stage.last].name],
                "devices": [device for slot in rank for device in slot],
                "replicas": len(rank),
                "recompute": stage.recompute,
            }
            for stage, rank in zip(found.plan.stages, found.plan.devices, strict=True)
        ],
        "step_seconds": found.step_seconds,
        "throughput": found.throughput,
        "bubble": found.timeline.bubble,
        "memory": [
            {"device": device, "bytes": held, "limit": _limit(found.cluster.devices[device].memory)}
            for device, held in sorted(found.memory.items())
        ],
        "fits": not found.over,
        "bottleneck": [{"share": share, "what": what} for share, what in found.busy[:3]],
        "order": [layer.name for layer in layers],
        "plan": found.plan.to_json(),
    }


def _limit(memory: float) -> float | None:
    return None if memory == float("inf") else memory


def as_text(found: Prediction) -> str:
    """What people read."""
    plan = found.plan
    lines = [
        f"{found.outcome.method}: {len(plan.stages)} stage(s), schedule {plan.schedule}, "
        f"{plan.microbatches} micro-batch(es) a step of {found.rows} rows"
    ]
    lines += [_stage_text(found, s) for s in range(len(plan.stages))]
    step, bubble = f"{found.step_seconds:.6g} s, {found.throughput:.6g} rows/s", f"{found.timeline.bubble:.1%}"
    lines.append(f"  step {step}, bubble {bubble}")
    causes = "; ".join(f"{what} {share:.0%}" for share, what in found.busy[:3])
    lines.append(f"  busiest, as a share of the step: {causes}")
    for device, missing in sorted(found.over.items(), key=lambda item: -item[1])[:1]:
        lines.append(
            f"  does not fit: device {device} is {missing / 1e9:.3g} GB short, {len(found.over)} device(s) in all"
        )
    return "\n".join(lines)


def _stage_text(found: Prediction, s: int) -> str:
    stage, layers = found.plan.stages[s], found.outcome.profile.layers
    devices = [device for slot in found.plan.devices[s] for device in slot]
    held, room = max((found.memory[d], found.cluster.devices[d].memory) for d in devices)
    limit = "no limit" if room == float("inf") else f"{room / 1e9:.3g} GB"
    names = f"{layers[stage.first].name[:24]} .. {layers[stage.last].name[:24]}"
    again = ", recomputed" if stage.recompute else ""
    return (
        f"  stage {s}: layers {stage.first} to {stage.last} ({names}{again}) on {len(devices)} x device "
        f"{_ranges(devices)}; {held / 1e9:.3g} of {limit}"
    )


def _ranges(devices: list[int]) -> str:
    """0, 1, 2, 5 as 0-2,5."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and runs[-1][-1] + 1 == device:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def plan_command(
    profile: str | Path,
    cluster: str | Path,
    method: str = "dapple",
    *,
    batch: int | None = None,
    microbatch: int | None = None,
    samples: int | None = None,
    hosts: int | None = None,
    json_wanted: bool = False,
) -> str:
    """The body of the command: what to print."""
    given, machines = read_profile(profile, samples), read_cluster(cluster, hosts)
    if method != "all":
        found = plan(given, machines, method=method, batch=batch, microbatch=microbatch)
        return json.dumps(as_json(found), indent=2) if json_wanted else as_text(found)
    every = plan_all(given, machines, batch=batch, microbatch=microbatch)
    if json_wanted:
        return json.dumps(
            [{"method": name, "refused": str(one)} if isinstance(one, InputError) else as_json(one)
             for name, one in zip(PLANNERS, every, strict=True)], indent=2,
        )  # fmt: skip
    texts = [
        f"{name}: {one}" if isinstance(one, InputError) else as_text(one)
        for name, one in zip(PLANNERS, every, strict=True)
    ]
    return "\n\n".join(texts)
