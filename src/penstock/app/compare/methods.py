"""The methods of `penstock compare`, each as changes to a config.

Where T1's K and T3's N are not given, they are a quarter and a tenth of the mini-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from penstock.errors import InputError
from penstock.schedules.registry import METHODS as SCHEDULES

PLAIN = "plain"
K, N = "K", "N"  # placeholders for T1's and T3's numbers until the budget is known


@dataclass(frozen=True)
class Method:
    """A method. `schedule` None: one plain process. `nesterov`: replaces the optimizer. `usual`: used by default."""

    name: str
    schedule: str | None
    options: dict[str, Any] = field(default_factory=dict)
    nesterov: bool = False
    usual: bool = True

    def with_budget(self, k: int, n: int) -> Method:
        """Return the method with T1's and T3's numbers."""
        numbers = {K: k, N: n}
        options = {name: numbers[value] if value in (K, N) else value for name, value in self.options.items()}
        return Method(self.name, self.schedule, options, self.nesterov, self.usual)

    @property
    def asynchronous(self) -> bool:
        return self.schedule is not None and SCHEDULES[self.schedule].asynchronous

    @property
    def flushed(self) -> int:
        """Mini-batches trained one at a time before training without a flush begins."""
        return int(self.options.get("t3", 0))


_TABLE = (
    Method(PLAIN, None),
    Method("naive", "naive"),
    Method("gpipe", "gpipe"),
    Method("1f1b", "1f1b"),
    Method("dapple", "dapple"),
    Method("pipedream", "pipedream"),
    Method("2bw", "2bw"),
    Method("pipemare", "pipemare", {"t2": True}),
    Method("pipemare-none", "pipemare", {"t2": False}),
    Method("pipemare-t1", "pipemare", {"t1": K, "t2": False}),
    Method("pipemare-t1-t2", "pipemare", {"t1": K, "t2": True}),
    Method("pipemare-t1-t2-t3", "pipemare", {"t1": K, "t2": True, "t3": N}),
    Method("nesterov", "pipedream", nesterov=True),
    Method("vertical-sync", "pipedream", {"vertical_sync": True}, usual=False),
    Method("no-stash", "pipedream", {"stash": False}, usual=False),
    Method("xpipe", "pipedream", {"predict": "xpipe"}, usual=False),
    Method("spectrain", "pipedream", {"predict": "spectrain"}, usual=False),
)
# Every other schedule is a method under its own name.
_OTHERS = (Method(name, name, usual=False) for name in SCHEDULES if name not in {method.name for method in _TABLE})
NAMED: dict[str, Method] = {method.name: method for method in (*_TABLE, *_OTHERS)}


def choose_methods(
    names: Sequence[str] | None, steps: int, t1: int | None = None, t3: int | None = None
) -> list[Method]:
    """Return the methods of these names, in their order, or the default ones."""
    for flag, value in (("--t1", t1), ("--t3", t3)):
        if value is not None and value < 1:
            raise InputError(f"{flag} to be at least 1 mini-batch", value, "correct it, or leave it out")
    k, n = t1 or max(1, steps // 4), t3 or max(1, steps // 10)
    selected = [method.name for method in NAMED.values() if method.usual] if names is None else list(names)
    if not selected:
        raise InputError("the names of some methods", "none", f"choose from {', '.join(NAMED)}")
    return [_find(name).with_budget(k, n) for name in dict.fromkeys(selected)]


def _find(name: str) -> Method:
    if name in NAMED:
        return NAMED[name]
    near = get_close_matches(name, NAMED, n=3)
    advice = f"try {' or '.join(near)}; all are" if near else "choose from"
    raise InputError("the name of a method", repr(name), f"{advice} {', '.join(NAMED)}")
