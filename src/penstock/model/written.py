"""Find the weights that a forward writes to while it is traced, and restore them.

A forward that keeps a moving average of weights, or clamps them, would do so in every trace and check too. And other
micro-batches run between a micro-batch's forward and its backward: a weight that the backward needs must not change
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import SplitError
from penstock.model.fakes import is_fake
from penstock.model.walk import Layout, users_line

_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_GENTLE = frozenset((torch.ops.aten.embedding_renorm_.default,))  # changes only rows in use, and nothing when repeated


class Written:
    """The weights that operations write to, with their values before. It is notified of every operation before it
    runs."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.places = {place(p): p for p in layout.model.parameters() if place(p) and not is_fake(p)}
        self.before: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor]] = {}  # the memory, and a copy of the values
        self.lines: dict[nn.Parameter, str] = {}
        self.gentle: set[nn.Parameter] = set()
        self.graphed: set[int] = set()  # ids of weights that a backward may need
        self.writes = 0

    def used(self, given: Iterable[torch.Tensor]) -> None:
        """Record a function's arguments, which a graph may keep."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            self.graphed.update(map(id, given))

    def setting(self, call: Any, args: Sequence[Any]) -> None:
        """Called before a function, to detect `weight.data = ...`, which is no operation."""
        if call == _SET_DATA and self.layout.is_parameter(args[0]):
            self.note(args[0])

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Called before an operation, to detect writes to weights."""
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[at] if at < len(args) else kwargs.get(argument.name)
                for tensor in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(tensor, torch.Tensor) and (weight := self.places.get(place(tensor))) is not None:
                        self.note(weight, func in _GENTLE)

    def note(self, weight: nn.Parameter, gentle: bool = False) -> None:
        """Record a weight before it is written to."""
        self.writes += 1
        if weight not in self.before:
            self.before[weight] = weight.data, weight.detach().clone()
            self.lines[weight] = users_line()
            if gentle:
                self.gentle.add(weight)
        elif not gentle:
            self.gentle.discard(weight)

    def settle(self) -> dict[str, str]:
        """Restore all weights. Return the names of those that were changed, and where, or "" if the change can be
        repeated; raise for those that must not change."""
        changed = [weight for weight, (_, values) in self.before.items() if not torch.equal(weight, values)]
        harmed = [weight for weight in changed if id(weight) in self.graphed and weight not in self.gentle]
        found = {self.layout.parameters[id(w)]: "" if w in self.gentle else self.lines[w] for w in changed}
        self.put_back()
        if harmed:
            raise SplitError(
                "a forward that leaves weights alone which a backward needs: others pass in between",
                f"{self.layout.parameters[id(harmed[0])]!r} changed at {self.lines[harmed[0]]}",
                "change them between two steps",
            )
        return found

    def put_back(self) -> None:
        put_back((weight, *before) for weight, before in self.before.items())

    def refuse_open(self) -> None:
        """Raise for a write between atoms, in code that every stage runs: not every stage has the weight."""
        weight, line = list(self.lines.items())[-1]
        raise SplitError(
            "no weight changed by code that a cut goes through",
            f"{self.layout.parameters[id(weight)]!r} at {line}",
            "change it inside one block, or between two steps",
        )


def put_back(weights: Iterable[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]) -> None:
    """Restore each weight's memory and values."""
    for weight, memory, values in weights:
        with torch.no_grad():
            if not torch.equal(memory, values):
                memory.copy_(values)
        if weight.data_ptr() != memory.data_ptr():
            weight.data = memory


def place(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 where it has none."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return 0
    storage = tensor.untyped_storage()
    return (
        storage._cdata if is_fake(tensor) else storage.data_ptr()
    )  # a fake has no memory, but views share its storage
