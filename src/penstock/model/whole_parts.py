"""The explanation why a model cannot be cut into more stages: its heaviest parts, and why each stays whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import nn

from penstock.model.trace import Trace

NAMED = 3  # parts in the explanation


def whole_parts(model: nn.Module, seen: Trace, load: list[float], hooks_of: Callable[[nn.Module], list[str]]) -> str:
    """Return the heaviest modules that the forward calls, each with its share of the operations and why it is not
    opened."""
    calls = Counter(event.name for event in seen.events if event.atom and not event.name.startswith("("))
    weight: dict[str, float] = dict.fromkeys(calls, 0.0)
    for event, its in zip(seen.events, load, strict=True):
        if event.atom and event.name in weight:
            weight[event.name] += its
    total = sum(load) or 1.0
    heaviest = sorted(weight, key=lambda name: -weight[name])[:NAMED]
    if not heaviest:
        return "the forward calls no submodules"
    told = []
    for name in heaviest:
        module = model.get_submodule(name)
        reason = _reason(module, calls[name], hooks_of(module))
        told.append(f"{name!r} ({type(module).__name__}, {weight[name] / total:.0%} of the operations) {reason}")
    return ", ".join(told)


def _reason(module: nn.Module, calls: int, hooks: list[str]) -> str:
    if not any(True for _ in module.children()):
        return "has no submodules"
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
        return "is compiled as a whole"
    if hooks:
        return f"has a hook of its own ({hooks[0]})"
    if calls > 1:
        return f"is called {calls} times"
    if type(module).__module__.startswith("torch.nn.modules"):
        return "is one of torch's own layers"
    return "has code that several stages cannot run (a cut that names a module in it, cuts=[...], says which)"
