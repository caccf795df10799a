"""Find where the smallest useful stages of a model begin."""

from __future__ import annotations

from typing import Any

from torch import nn

from penstock.errors import SplitError
from penstock.model.allowed import refusal
from penstock.model.cuts import is_part, open_for
from penstock.model.opening import LISTS, next_to_open, to_open, wrongly_open
from penstock.model.record import trace
from penstock.model.trace import Trace
from penstock.model.walk import Layout

_LIGHT = frozenset(f"torch.nn.modules.{name}" for name in ("activation", "dropout", "flatten", "linear", "pooling"))


def piece_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[str], Trace | None]:
    """Return the modules at which pieces begin, in order; and the trace, if cuts at all of them open the same
    modules."""
    opened, seen = _opened(model, args, kwargs)
    parts = [event.name for event in seen.events if is_part(event)]
    names = parts[:1] + [seen.events[at].name for at in _beginnings(model, seen)]
    needed = {name for name in open_for(model, names[1:]) if not isinstance(model.get_submodule(name), LISTS)}
    return names, seen if needed == opened else None


def _beginnings(model: nn.Module, seen: Trace) -> list[int]:
    return [at for at in _candidates(model, seen) if refusal(seen, at) is None]


def _candidates(model: nn.Module, seen: Trace) -> list[int]:
    """Return the events at which the second, third, ... piece could begin: first calls of modules."""
    far, parted = _called_from_afar(model), _parted_hooks(model, seen)
    met: set[str] = set()
    found, begun = [], False
    for at, event in enumerate(seen.events):
        if not is_part(event) or event.name in met:
            continue
        met.add(event.name)
        light = _is_light(model.get_submodule(event.name))
        worth = begun and not light and event.name not in far and at not in parted and not _spoils(seen, at)
        found += [at] if worth else []
        begun = begun or not light
    return found


def _is_light(module: nn.Module) -> bool:
    """Whether a module is an activation, a dropout or a pooling: it has no weights and its output is no larger than its
    input, so it belongs to the piece before it."""
    return type(module).__module__ in _LIGHT and next(module.parameters(), None) is None


def _spoils(seen: Trace, at: int) -> bool:
    """Whether an event changes an earlier value in place: a cut there would cost a copy."""
    event = seen.events[at]
    return not event.free and any(seen.values[before].made_by >= 0 for before, _ in event.changes)


def _called_from_afar(model: nn.Module) -> set[str]:
    """Return modules that several others hold: a cut named after one opens only the modules around its first name."""
    homes: dict[int, set[str]] = {}
    names: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        homes.setdefault(id(module), set()).add(name.rpartition(".")[0])
        names.setdefault(id(module), name)
    return {names[module] for module, home in homes.items() if len(home) > 1}


def _parted_hooks(model: nn.Module, seen: Trace) -> set[int]:
    """Return the events before which a cut would separate the uses of a parameter that has a hook."""
    every = dict(model.named_parameters(remove_duplicate=False))
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooked = [
        uses for name, uses in seen.parameters().items() if any(getattr(every[name], kind, None) for kind in kinds)
    ]
    return {at for uses in hooked for at in range(min(uses) + 1, max(uses) + 1)}


def _opened(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[frozenset[str], Trace]:
    """Return the modules to open, and the trace with them open. Usually one trace suffices, as traces of large models
    take time."""
    closed: frozenset[str] = frozenset()
    while True:
        opened = to_open(model, closed)
        try:
            seen = trace(Layout(model, opened), args, kwargs)
        except SplitError:
            return _step_by_step(model, closed, args, kwargs)
        wrong = wrongly_open(model, opened, seen)
        if not wrong:
            refused = len(_beginnings(model, seen)) < len(_candidates(model, seen))
            return _step_by_step(model, closed, args, kwargs) if refused else (opened, seen)
        closed |= wrong


def _step_by_step(
    model: nn.Module, closed: frozenset[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[frozenset[str], Trace]:
    """Return the same where some module cannot be opened, or forbids cuts once it is open: it stays closed."""
    opened = frozenset({""})
    seen = trace(Layout(model, opened), args, kwargs)
    while further := next_to_open(model, opened, closed):
        wider = _wider(model, seen, opened | further, args, kwargs)
        if wider is not None:
            seen, opened = wider, opened | further
            continue
        bad = {name for name in further if _wider(model, seen, opened | {name}, args, kwargs) is None}
        closed |= bad or further
    return opened, seen


def _wider(model: nn.Module, seen: Trace, opened: frozenset[str], args: tuple[Any, ...], kwargs: Any) -> Trace | None:
    """Return a trace with more modules open, or None where that would lose places for cuts."""
    try:
        wider = trace(Layout(model, opened), args, kwargs)
    except SplitError:
        return None
    before = {seen.events[at].name for at in _beginnings(model, seen)} - opened
    lost = before - {wider.events[at].name for at in _beginnings(model, wider)}
    return None if lost or wrongly_open(model, opened, wider) else wider
