"""Rules between the values of a config that its types cannot express, those of its schedule among them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from penstock.app.config.schema import Fault, as_arguments, nearest, shown
from penstock.errors import InputError
from penstock.training.checkpoint.kept_steps import AUTO

NOT_HERE = {"costs", "seed"}  # of auto: no TOML can say the one, and the other is pipeline.seed
NEEDED = ("schedule", "stages", "microbatches", "chunks", "cuts", "options")


def schedule_faults(good: dict[str, Any]) -> Iterator[Fault]:
    """What is wrong with the schedule and its options, each by its own path."""
    from penstock.schedules.registry import find

    found = {key: good.get(f"pipeline.{key}", 0) for key in NEEDED}
    try:
        if found["schedule"]:
            find(found["schedule"])
    except InputError as error:
        yield _fault("pipeline.schedule", error)
        return
    if 0 in [found[key] for key in NEEDED if key != "options"]:
        return
    options = found["options"] if isinstance(found["options"], dict) else {}
    unknown = list(_unknown(found["schedule"], options))
    yield from unknown
    refused = None if unknown else _schedule_refusal(found, options)
    if refused is not None:
        yield from _blamed(found, options, refused)


def _unknown(schedule: str, options: dict[str, Any]) -> Iterator[Fault]:
    from penstock.schedules.registry import find
    from penstock.training.staleness import NAMES

    method = find(schedule)
    known = {*method.options, *(NAMES if method.asynchronous else ())} - NOT_HERE
    for name in options:
        if name in NAMES and not method.asynchronous:
            came = f"{method.name}, which is synchronous"
            yield Fault(f"pipeline.options.{name}", "an asynchronous schedule", came, "leave it out")
        elif name not in known:
            do = nearest(name, known) if known else "leave it out: it has none"
            yield Fault(f"pipeline.options.{name}", f"an option of {method.name}", "an unknown one", do)


def _blamed(found: dict[str, Any], options: dict[str, Any], refused: InputError) -> Iterator[Fault]:
    """Whose fault it is: the schedule's without options, some single option's, or that of all together."""
    bare = _schedule_refusal(found, {})
    if bare is not None:
        yield _fault("pipeline", bare)
        return
    single = {name: _schedule_refusal(found, {name: value}) for name, value in options.items()}
    wrong = [_fault(f"pipeline.options.{name}", error) for name, error in single.items() if error is not None]
    yield from wrong or [_fault("pipeline.options", refused)]


def _schedule_refusal(found: dict[str, Any], options: dict[str, Any]) -> InputError | None:
    """What is said of the schedule with these options."""
    from penstock.training.schedule_choice import ScheduleChoice, read_schedule
    from penstock.training.staleness import read_remedies

    named = (found["schedule"], found["stages"], found["microbatches"], found["chunks"])
    try:
        built = read_schedule(ScheduleChoice(*named, options), found["cuts"])
        read_remedies(options, built.shape)
    except InputError as error:
        return error
    return None


def _fault(path: str, error: InputError) -> Fault:
    return Fault(path, error.expected, str(error.came), error.do)


Good = dict[str, Any]  # by dotted key


def rules(good: Good) -> Iterator[Fault]:
    """Every rule that is broken."""
    if good.get("model.kind") == "gpt":
        yield from _gpt(good)
    yield from schedule_faults(good)
    yield from _training(good)
    if "optimizer.name" in good:
        yield from _optimizer(good)


def _gpt(good: Good) -> Iterator[Fault]:
    width, heads = good.get("model.width"), good.get("model.heads")
    if width and heads and width % heads:
        yield Fault("model.width", f"a multiple of its {heads} heads", str(width))
    longest, length = good.get("model.length"), good.get("data.length")
    if longest and length and length > longest:
        yield Fault("data.length", f"at most model.length, {longest}", str(length))
    if good.get("data.kind") == "digits":
        yield Fault("data.kind", '"text" for a model that reads tokens', '"digits"', "choose another model or data")
    if "data.factory" in good and good.get("model.vocab", 0) is None:
        yield Fault("model.vocab", "how many different tokens the data has", "nothing", "add it")


def _training(good: Good) -> Iterator[Fault]:
    batch, parts = good.get("training.batch"), good.get("pipeline.microbatches")
    if batch and parts and batch < parts:
        expected = f"at least {parts} rows, one for each micro-batch"
        yield Fault("training.batch", expected, str(batch), "enlarge it, or lower pipeline.microbatches")
    wants = good.get("training.checkpoint_every") or good.get("training.keep") or good.get("training.resume") == AUTO
    if wants and good.get("training.checkpoint", 0) is None:
        yield Fault("training.checkpoint", "a path to write checkpoints to", "nothing", "add it")
    if good.get("training.sample") and not (good.get("model.kind") == "gpt" and "data.path" in good):
        expected, came = "0 for anything but text and the model gpt", str(good["training.sample"])
        yield Fault("training.sample", expected, came, "leave it out, or choose these")


def _optimizer(good: Good) -> Iterator[Fault]:
    """Made once over a weight of no importance: torch itself says what it thinks of the values."""
    import torch

    from penstock.training.optimizers import NOT_IN_FILES, OPTIMIZERS

    weight = torch.nn.Parameter(torch.zeros(1, 1))
    given = {key.removeprefix("optimizer."): value for key, value in good.items() if key.startswith("optimizer.")}
    faults = [*_not_finite("optimizer", given)]  # which torch's own classes mostly take
    yield from faults
    if faults:
        return
    scheduler = given.pop("scheduler", None)
    made = yield from _made("optimizer", given, torch.optim, torch.optim.Optimizer, [weight], OPTIMIZERS, NOT_IN_FILES)
    home = torch.optim.lr_scheduler
    if scheduler is not None and "name" not in scheduler:
        yield from _nameless("optimizer.scheduler", scheduler, home, home.LRScheduler)
    elif scheduler is not None:
        if made is None:
            made = torch.optim.SGD([weight])
        found = yield from _made("optimizer.scheduler", dict(scheduler), home, home.LRScheduler, made)
        most, steps = getattr(found, "total_steps", None), good.get("training.steps")
        if most is not None and steps and steps > most:  # torch itself says so, after that many
            expected = f"at least training.steps, {steps}"
            yield Fault("optimizer.scheduler.total_steps", expected, str(most), "enlarge it, or lower training.steps")


def _not_finite(path: str, given: Good) -> Iterator[Fault]:
    for key, value in given.items():
        numbers = [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, float)]
        if isinstance(value, dict):
            yield from _not_finite(f"{path}.{key}", value)
        elif not all(map(isfinite, numbers)):
            yield Fault(f"{path}.{key}", "finite numbers", shown(value))


def _nameless(path: str, given: Good, home: Any, base: type) -> Iterator[Fault]:
    """Keys that no class takes: one of them may be the name, mistyped."""
    kinds = [kind for kind in vars(home).values() if _usable(kind, base)]
    known = {"name"}.union(*(_takes(kind) for kind in kinds))
    for key in given.keys() - known:
        yield Fault(f"{path}.{key}", f"a key of [{path}]", "an unknown one", nearest(key, known))


def _made(
    path: str,
    given: dict[str, Any],
    home: Any,
    base: type,
    first: Any,
    ours: Mapping[str, Any] | None = None,
    hidden: frozenset[str] = frozenset(),
) -> Generator[Fault, None, Any]:
    name, arguments = given.pop("name"), as_arguments(given)
    kinds = {known: kind for known, kind in vars(home).items() if _usable(kind, base)} | dict(ours or {})
    if name not in kinds:
        yield Fault(f"{path}.name", f"a class of {home.__name__}", shown(name), nearest(name, set(kinds)))
        return None
    takes = _takes(kinds[name])
    known = set(takes) - hidden
    whose = name if name in (ours or {}) else f"{home.__name__}.{name}"
    for key in arguments.keys() - known:
        yield Fault(f"{path}.{key}", f"an argument of {whose}", "an unknown one", nearest(key, known))
    needed = [key for key, one in takes.items() if _is_needed(one)]
    missing = [key for key in needed if key not in arguments]
    for key in missing:
        yield Fault(f"{path}.{key}", f"an argument that {whose} needs", "nothing", "add it")
    if missing:
        return None
    right = {key: value for key, value in arguments.items() if key in known}
    error = _argument_refusal(kinds[name], first, right)
    if error is None:
        return kinds[name](first, **right)
    expected = f"a value that {name} takes"
    wrong = _refused_alone(right, needed, lambda some: _argument_refusal(kinds[name], first, some))
    yield from [Fault(f"{path}.{key}", expected, f"{shown(right[key])} ({said})") for key, said in wrong.items()]
    if not wrong:
        yield Fault(path, f"values that {name} takes together", error)
    return None


def _takes(kind: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """A class's arguments without the first, which are the parameters, or the optimizer."""
    return dict(list(inspect.signature(kind).parameters.items())[1:])


def _refused_alone(given: Good, needed: Sequence[str], refusal: Callable[[Good], str | None]) -> dict[str, str]:
    """What is said of each value that is refused beside those alone that must be there; or of the only such one."""
    least = {key: given[key] for key in needed}
    said = refusal(least)
    if said is not None:
        return {needed[0]: said} if len(needed) == 1 and said == refusal(given) else {}
    suspects = {key for key, value in given.items() if refusal(least | {key: value}) is not None}
    beside = {key: value for key, value in given.items() if key not in suspects}  # some values need others
    found = {key: refusal(beside | {key: given[key]}) for key in given if key in suspects}
    return {key: said for key, said in found.items() if said is not None}


def _argument_refusal(kind: Callable[..., Any], first: Any, arguments: Good) -> str | None:
    """Whatever torch says of values that it cannot use."""
    try:
        kind(first, **arguments)
    except Exception as error:
        return str(error)
    return None


def _is_needed(one: inspect.Parameter) -> bool:
    plain = one.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return plain and one.default is inspect.Parameter.empty


def _usable(kind: Any, base: type) -> bool:
    """A class that steps without being handed a closure."""
    if not (isinstance(kind, type) and issubclass(kind, base) and kind is not base):
        return False
    step: Any = vars(kind).get("step", getattr(base, "step", None))
    wanted = list(inspect.signature(step).parameters.values())[1:]
    return all(parameter.default is not inspect.Parameter.empty for parameter in wanted)
