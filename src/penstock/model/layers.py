"""A model's layers, for profiles and plans: a split with a cut at every useful place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from penstock.core.profile import Sent
from penstock.errors import SplitError
from penstock.model.pieces import piece_names
from penstock.model.split import Split


@dataclass(frozen=True)
class ModelLayer:
    """A range of events. `name` is the module at which it begins, as in `cuts`."""

    name: str
    span: tuple[int, int]  # the range of events in the split's first path
    parameters: tuple[str, ...]  # by the model's own names; a tied one belongs to the first layer that uses it
    buffers: tuple[str, ...]  # those that belong to no layer are counted with the first


class Layers:
    """The layers of one model, in order. Each is a stage of `split`."""

    def __init__(self, split: Split, names: list[str], whole: SplitError | None = None) -> None:
        self.split, self.names = split, tuple(names)
        self.whole = whole  # why the model is one layer, where it could not be cut

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Any:
        return iter(self.layers)

    def __getitem__(self, at: int) -> ModelLayer:
        return self.layers[at]

    def cuts(self, firsts: tuple[int, ...]) -> list[str]:
        """Return the `cuts` of a Pipeline whose second, third, ... stages begin at these layers."""
        return [self.names[first] for first in firsts]

    @cached_property
    def layers(self) -> tuple[ModelLayer, ...]:
        homes = self.split.buffer_stages()
        buffers = [name for name, _ in self.split.model.named_buffers()]
        return tuple(
            ModelLayer(
                name,
                self.split.first.span(at),
                tuple(self.split.parameters(at)),
                tuple(buffer for buffer in buffers if homes.get(buffer, 0) == at),
            )
            for at, name in enumerate(self.names)
        )

    @cached_property
    def sent(self) -> tuple[Sent, ...]:
        """The tensors sent from one layer to others, without those that every stage computes for itself."""
        path = self.split.first
        readers: dict[int, list[int]] = {}
        for layer, values in enumerate(path.incoming):
            for value in values:
                readers.setdefault(value, []).append(layer)
        known = path.trace.values
        return tuple(
            Sent(path.stage_of(known[value].made_by), tuple(layers), known[value].bytes)
            for value, layers in sorted(readers.items())
        )

    @cached_property
    def edges(self) -> dict[tuple[int, int], float]:
        """Bytes from one layer to another."""
        found: dict[tuple[int, int], float] = {}
        for one in self.sent:
            for reader in one.readers:
                found[one.source, reader] = found.get((one.source, reader), 0.0) + one.bytes
        return dict(sorted(found.items()))


def layers_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layers:
    """Return the layers of a model, found with an example of its inputs; a model that cannot be cut is one layer.

    The weights may be missing. The model is not changed.
    """
    kind = type(model).__name__  # the name of a model that is one layer
    try:
        names, seen = piece_names(model, args, kwargs)
        return Layers(Split(model, max(len(names), 1), args, kwargs, names[1:], seen), names or [kind])
    except SplitError as reason:
        return Layers(Split(model, 1, args, kwargs), [kind], reason)
