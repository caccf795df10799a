"""Rules between the values of a config that its types cannot express, including those of its schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from penstock.app.config.schema import ConfigFault, as_arguments, shown, suggestion
from penstock.core.loop import Loop
from penstock.core.schedule import Schedule
from penstock.errors import InputError
from penstock.training.checkpoint.kept_steps import AUTO

NOT_HERE = {"costs", "seed"}  # options of auto: TOML cannot express the first, and the second is pipeline.seed
NEEDED = ("schedule", "stages", "replicas", "microbatches", "chunks", "cuts", "options")


def schedule_faults(good: dict[str, Any]) -> Iterator[ConfigFault]:
    """Yield the faults of the schedule and its options, each under its own path."""
    from penstock.schedules.registry import find

    values = {key: good.get(f"pipeline.{key}", 0) for key in NEEDED}
    try:
        if values["schedule"]:
            find(values["schedule"])
    except InputError as error:
        yield _fault("pipeline.schedule", error)
        return
    if 0 in [values[key] for key in NEEDED if key != "options"]:
        return
    options = values["options"] if isinstance(values["options"], dict) else {}
    unknown = list(_unknown(values["schedule"], options))
    yield from unknown
    refusal = None if unknown else _schedule_refusal(values, options)
    if refusal is not None:
        yield from _locate_fault(values, options, refusal)
    elif not unknown and good.get("pipeline.shard"):
        yield from _shard(values, options)


def _unknown(schedule: str, options: dict[str, Any]) -> Iterator[ConfigFault]:
    from penstock.schedules.registry import find
    from penstock.training.staleness import NAMES

    method = find(schedule)
    names = {*method.options, *(NAMES if method.asynchronous else ())} - NOT_HERE
    for name in options:
        if name in NAMES and not method.asynchronous:
            came = f"{method.name}, which is synchronous"
            yield ConfigFault(f"pipeline.options.{name}", "an asynchronous schedule", came, "leave it out")
        elif name not in names:
            do = suggestion(name, names) if names else "leave it out: it has none"
            yield ConfigFault(f"pipeline.options.{name}", f"an option of {method.name}", "an unknown one", do)


def _locate_fault(values: dict[str, Any], options: dict[str, Any], error_of_all: InputError) -> Iterator[ConfigFault]:
    """Yield the fault of the schedule without options and replicas, of the replicas, of single options, or of all
    options together."""
    bare = _schedule_refusal(values, {})
    if bare is not None:
        alone = _schedule_refusal(values | {"replicas": 1}, {})
        yield _fault("pipeline", alone) if alone is not None else _fault("pipeline.replicas", bare)
        return
    single = {name: _schedule_refusal(values, {name: value}) for name, value in options.items()}
    wrong = [_fault(f"pipeline.options.{name}", error) for name, error in single.items() if error is not None]
    yield from wrong or [_fault("pipeline.options", error_of_all)]


def _schedule_refusal(values: dict[str, Any], options: dict[str, Any]) -> InputError | None:
    """Return the error for the schedule with these options; None if it is valid."""
    from penstock.training.staleness import read_mitigation

    try:
        read_mitigation(options, _read_schedule(values, options).shape)
    except InputError as error:
        return error
    return None


def _read_schedule(values: dict[str, Any], options: dict[str, Any]) -> Schedule | Loop:
    from penstock.training.schedule_choice import ScheduleChoice, read_schedule

    named = (values["schedule"], values["stages"], values["microbatches"], values["chunks"])
    return read_schedule(ScheduleChoice(*named, options, replicas=values["replicas"]), values["cuts"])


def _shard(values: dict[str, Any], options: dict[str, Any]) -> Iterator[ConfigFault]:
    from penstock.training.schedule_choice import require_shards

    try:
        require_shards(_read_schedule(values, options))
    except InputError as error:
        yield _fault("pipeline.shard", error)


def _fault(path: str, error: InputError) -> ConfigFault:
    return ConfigFault(path, error.expected, str(error.came), error.do)


Good = dict[str, Any]  # by dotted key


def rules(good: Good) -> Iterator[ConfigFault]:
    """Yield a fault for every rule that is broken."""
    if good.get("model.kind") == "gpt":
        yield from _gpt(good)
    yield from schedule_faults(good)
    yield from _training(good)
    if "optimizer.name" in good:
        yield from _optimizer(good)


def _gpt(good: Good) -> Iterator[ConfigFault]:
    width, heads = good.get("model.width"), good.get("model.heads")
    if width and heads and width % heads:
        yield ConfigFault("model.width", f"a multiple of its {heads} heads", str(width))
    longest, length = good.get("model.length"), good.get("data.length")
    if longest and length and length > longest:
        yield ConfigFault("data.length", f"at most model.length, {longest}", str(length))
    if good.get("data.kind") == "digits":
        yield ConfigFault(
            "data.kind", '"text" for a model that reads tokens', '"digits"', "choose another model or data"
        )
    if "data.factory" in good and good.get("model.vocab", 0) is None:
        yield ConfigFault("model.vocab", "how many different tokens the data has", "nothing", "add it")


def _training(good: Good) -> Iterator[ConfigFault]:
    batch, parts = good.get("training.batch"), good.get("pipeline.microbatches")
    if batch and parts and batch < parts:
        expected = f"at least {parts} rows, one for each micro-batch"
        yield ConfigFault("training.batch", expected, str(batch), "enlarge it, or lower pipeline.microbatches")
    replicas = good.get("pipeline.replicas", 1)
    most = max(replicas) if isinstance(replicas, list) else replicas
    if batch and batch < most:
        expected = f"at least {most} rows, one for each replica"
        yield ConfigFault("training.batch", expected, str(batch), "enlarge it, or lower pipeline.replicas")
    wants = good.get("training.checkpoint_every") or good.get("training.keep") or good.get("training.resume") == AUTO
    if wants and good.get("training.checkpoint", 0) is None:
        yield ConfigFault("training.checkpoint", "a path to write checkpoints to", "nothing", "add it")
    if good.get("training.sample") and not (good.get("model.kind") == "gpt" and "data.path" in good):
        expected, came = "0 for anything but text and the model gpt", str(good["training.sample"])
        yield ConfigFault("training.sample", expected, came, "leave it out, or choose these")


def _optimizer(good: Good) -> Iterator[ConfigFault]:
    """Build the optimizer once over a dummy weight: torch itself checks the values."""
    import torch

    from penstock.training.optimizers import NOT_IN_FILES, OPTIMIZERS

    weight = torch.nn.Parameter(torch.zeros(1, 1))
    given = {key.removeprefix("optimizer."): value for key, value in good.items() if key.startswith("optimizer.")}
    faults = [*_not_finite("optimizer", given)]  # which torch mostly accepts
    yield from faults
    if faults:
        return
    scheduler = given.pop("scheduler", None)
    optimizer = yield from _build(
        "optimizer", given, torch.optim, torch.optim.Optimizer, [weight], OPTIMIZERS, NOT_IN_FILES
    )
    home = torch.optim.lr_scheduler
    if scheduler is not None and "name" not in scheduler:
        yield from _missing_name("optimizer.scheduler", scheduler, home, home.LRScheduler)
    elif scheduler is not None:
        if optimizer is None:
            optimizer = torch.optim.SGD([weight])
        built_scheduler = yield from _build("optimizer.scheduler", dict(scheduler), home, home.LRScheduler, optimizer)
        most, steps = getattr(built_scheduler, "total_steps", None), good.get("training.steps")
        if most is not None and steps and steps > most:  # torch raises only after that many steps
            expected = f"at least training.steps, {steps}"
            yield ConfigFault(
                "optimizer.scheduler.total_steps", expected, str(most), "enlarge it, or lower training.steps"
            )


def _not_finite(path: str, given: Good) -> Iterator[ConfigFault]:
    for key, value in given.items():
        numbers = [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, float)]
        if isinstance(value, dict):
            yield from _not_finite(f"{path}.{key}", value)
        elif not all(map(isfinite, numbers)):
            yield ConfigFault(f"{path}.{key}", "finite numbers", shown(value))


def _missing_name(path: str, given: Good, home: Any, base: type) -> Iterator[ConfigFault]:
    """Yield unknown keys of a section without `name`: one of them may be the name, mistyped."""
    kinds = [kind for kind in vars(home).values() if _usable(kind, base)]
    keys = {"name"}.union(*(_takes(kind) for kind in kinds))
    for key in given.keys() - keys:
        yield ConfigFault(f"{path}.{key}", f"a key of [{path}]", "an unknown one", suggestion(key, keys))


def _build(
    path: str,
    given: dict[str, Any],
    home: Any,
    base: type,
    first: Any,
    own_classes: Mapping[str, Any] | None = None,
    hidden: frozenset[str] = frozenset(),
) -> Generator[ConfigFault, None, Any]:
    """Build an optimizer or LR scheduler from its section; yield the faults, and return None if there are any."""
    name, arguments = given.pop("name"), as_arguments(given)
    kinds = {key: kind for key, kind in vars(home).items() if _usable(kind, base)} | dict(own_classes or {})
    if name not in kinds:
        yield ConfigFault(f"{path}.name", f"a class of {home.__name__}", shown(name), suggestion(name, set(kinds)))
        return None
    takes = _takes(kinds[name])
    valid = set(takes) - hidden
    whose = name if name in (own_classes or {}) else f"{home.__name__}.{name}"
    for key in arguments.keys() - valid:
        yield ConfigFault(f"{path}.{key}", f"an argument of {whose}", "an unknown one", suggestion(key, valid))
    needed = [key for key, one in takes.items() if _is_needed(one)]
    missing = [key for key in needed if key not in arguments]
    for key in missing:
        yield ConfigFault(f"{path}.{key}", f"an argument that {whose} needs", "nothing", "add it")
    if missing:
        return None
    right = {key: value for key, value in arguments.items() if key in valid}
    error = _argument_refusal(kinds[name], first, right)
    if error is None:
        return kinds[name](first, **right)
    expected = f"a value that {name} takes"
    wrong = _rejected_arguments(right, needed, lambda some: _argument_refusal(kinds[name], first, some))
    yield from [
        ConfigFault(f"{path}.{key}", expected, f"{shown(right[key])} ({reason})") for key, reason in wrong.items()
    ]
    if not wrong:
        yield ConfigFault(path, f"values that {name} takes together", error)
    return None


def _takes(kind: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return a class's arguments without the first, which is the parameters or the optimizer."""
    return dict(list(inspect.signature(kind).parameters.items())[1:])


def _rejected_arguments(given: Good, needed: Sequence[str], refusal: Callable[[Good], str | None]) -> dict[str, str]:
    """Return the error for each argument that is rejected in combination with the required ones; if the required
    arguments themselves are rejected, for the only required one."""
    least = {key: given[key] for key in needed}
    reason = refusal(least)
    if reason is not None:
        return {needed[0]: reason} if len(needed) == 1 and reason == refusal(given) else {}
    suspects = {key for key, value in given.items() if refusal(least | {key: value}) is not None}
    beside = {key: value for key, value in given.items() if key not in suspects}  # some values need others
    errors = {key: refusal(beside | {key: given[key]}) for key in given if key in suspects}
    return {key: reason for key, reason in errors.items() if reason is not None}


def _argument_refusal(kind: Callable[..., Any], first: Any, arguments: Good) -> str | None:
    """Return torch's error for values that it rejects; None if it accepts them."""
    try:
        kind(first, **arguments)
    except Exception as error:
        return str(error)
    return None


def _is_needed(one: inspect.Parameter) -> bool:
    plain = one.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return plain and one.default is inspect.Parameter.empty


def _usable(kind: Any, base: type) -> bool:
    """Whether a class is an optimizer or scheduler whose step needs no closure."""
    if not (isinstance(kind, type) and issubclass(kind, base) and kind is not base):
        return False
    step: Any = vars(kind).get("step", getattr(base, "step", None))
    parameters = list(inspect.signature(step).parameters.values())[1:]
    return all(parameter.default is not inspect.Parameter.empty for parameter in parameters)
