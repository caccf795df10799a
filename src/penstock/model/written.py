"""Weights that a forward writes to: found while it is traced, and put back.

A forward that keeps a moving average of weights, or clamps them, would do so for every trace and check too. And between
a micro-batch's forward and its backward others pass: a weight that the backward needs must stay what it was meanwhile.
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
_GENTLE = frozenset((torch.ops.aten.embedding_renorm_.default,))  # of a row that is in use, and a second time nothing


class Written:
    """Told of every operation before it runs; keeps what the weights held that it writes to."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.places = {place(p): p for p in layout.model.parameters() if place(p) and not is_fake(p)}
        self.before: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor]] = {}  # its memory, and a copy of its values
        self.lines: dict[nn.Parameter, str] = {}
        self.gentle: set[nn.Parameter] = set()
        self.graphed: set[int] = set()  # identities of weights that a backward may need
        self.writes = 0

    def used(self, given: Iterable[torch.Tensor]) -> None:
        """What a function is given: a graph may keep it."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            self.graphed.update(map(id, given))

    def setting(self, call: Any, args: Sequence[Any]) -> None:
        """Before a function: `weight.data = ...` is one, and no operation."""
        if call == _SET_DATA and self.layout.is_parameter(args[0]):
            self.note(args[0])

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Before an operation that changes something given to it."""
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[at] if at < len(args) else kwargs.get(argument.name)
                for tensor in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(tensor, torch.Tensor) and (weight := self.places.get(place(tensor))) is not None:
                        self.note(weight, func in _GENTLE)

    def note(self, weight: nn.Parameter, gentle: bool = False) -> None:
        """Before a weight is written to."""
        self.writes += 1
        if weight not in self.before:
            self.before[weight] = weight.data, weight.detach().clone()
            self.lines[weight] = users_line()
            if gentle:
                self.gentle.add(weight)
        elif not gentle:
            self.gentle.discard(weight)

    def settle(self) -> dict[str, str]:
        """Put all weights back. Returns the names of those that were changed, and where, unless it does no harm to do
        it again; refuses those that must not be."""
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
        """Between atoms: code that every stage runs, where not every stage has the weight."""
        weight, line = list(self.lines.items())[-1]
        raise SplitError(
            "no weight changed by code that a cut goes through",
            f"{self.layout.parameters[id(weight)]!r} at {line}",
            "change it inside one block, or between two steps",
        )


def put_back(weights: Iterable[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]) -> None:
    """Each weight gets its memory and its values again."""
    for weight, memory, values in weights:
        with torch.no_grad():
            if not torch.equal(memory, values):
                memory.copy_(values)
        if weight.data_ptr() != memory.data_ptr():
            weight.data = memory


def place(tensor: torch.Tensor) -> int:
    """Where in memory a tensor lies; 0 where it has no place."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return 0
    storage = tensor.untyped_storage()
    return storage._cdata if is_fake(tensor) else storage.data_ptr()  # a fake's memory is nowhere, yet shared by views
