"""What must hold between the values of a config. A rule speaks where the values that it needs were understood."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from penstock.app.config import as_arguments
from penstock.app.config_faults import Fault, nearest, shown
from penstock.app.config_schedule import schedule_faults

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
    if good.get("training.checkpoint_every") and good.get("training.checkpoint", 0) is None:
        yield Fault("training.checkpoint", "a path to write checkpoints to", "nothing", "add it")


def _optimizer(good: Good) -> Iterator[Fault]:
    """Made once over a weight of no importance: torch itself says what it thinks of the values."""
    import torch

    from penstock.app.optimizers import NOT_IN_FILES, OPTIMIZERS

    weight = torch.nn.Parameter(torch.zeros(1, 1))
    given = {key.removeprefix("optimizer."): value for key, value in good.items() if key.startswith("optimizer.")}
    scheduler = given.pop("scheduler", None)
    made = yield from _made("optimizer", given, torch.optim, torch.optim.Optimizer, [weight], OPTIMIZERS, NOT_IN_FILES)
    if scheduler is not None and "name" in scheduler:
        if made is None:
            made = torch.optim.SGD([weight])
        home = torch.optim.lr_scheduler
        yield from _made("optimizer.scheduler", dict(scheduler), home, home.LRScheduler, made)


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
    known = set(list(inspect.signature(kinds[name]).parameters)[1:]) - hidden
    for key in arguments.keys() - known:
        whose = name if name in (ours or {}) else f"{home.__name__}.{name}"
        yield Fault(f"{path}.{key}", f"an argument of {whose}", "an unknown one", nearest(key, known))
    try:
        return kinds[name](first, **{key: value for key, value in arguments.items() if key in known})
    except Exception as error:  # whatever torch says of values that it cannot use
        yield Fault(path, f"values that {name} takes", str(error))
        return None


def _usable(kind: Any, base: type) -> bool:
    """A class that steps without being handed a closure."""
    if not (isinstance(kind, type) and issubclass(kind, base) and kind is not base):
        return False
    step: Any = vars(kind).get("step", getattr(base, "step", None))
    wanted = list(inspect.signature(step).parameters.values())[1:]
    return all(parameter.default is not inspect.Parameter.empty for parameter in wanted)
