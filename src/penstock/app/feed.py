"""Batches for every rank: each has its own, which must be the same, or rank 0 has them and the others get them from it.

On the wire a batch is tensors and plain words (JSON); nothing that could run code.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch

from penstock.app.crew import Crew, raw
from penstock.app.inputs import pairs
from penstock.engine.transport.lane import Message
from penstock.engine.transport.packet import from_bytes, to_bytes
from penstock.errors import InputError
from penstock.model import tree
from penstock.model.naming import leaf_places

_PLAIN = (type(None), bool, int, float, str)


class Feed:
    """Hands out batches. `source` is the rank that has them, None where all do."""

    def __init__(self, crew: Crew, data: str, device: torch.device) -> None:
        if data not in ("every", "rank0"):
            raise InputError("data to be 'every' (rank has it) or 'rank0'", repr(data), "choose one")
        self.crew, self.device = crew, device
        self.source = None if data == "every" or crew.alone else 0

    def one(self, inputs: Any, target: Any) -> tuple[Any, Any]:
        """One batch, on every rank. What is like a dict (a tokenizer's result, say) becomes one."""
        inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        if self.source is None:
            return inputs, target
        mine = self.crew.world.rank == self.source
        if mine and inputs is None:
            raise InputError("a batch on rank 0", "None", "give the data on rank 0, as data='rank0' says")
        packed = self.crew.world.broadcast(_packed((inputs, target)) if mine else None, self.source)
        return (inputs, target) if mine else _unpacked(packed, self.device)

    def each(self, loader: Iterable[Any] | None) -> Iterator[tuple[Any, Any]]:
        """All batches of a loader, which only the source needs to have."""
        if self.source is None or self.crew.world.rank == self.source:
            if loader is None:
                raise InputError("a loader", "None", "give the data on this rank, or data='rank0' to the Pipeline")
            for inputs, target in pairs(loader):
                self._more(True)
                yield inputs, target
            self._more(False)
            return
        while self._more(None):
            yield None, None

    def _more(self, more: bool | None) -> bool:
        if self.source is None:
            return bool(more)
        return self.crew.world.broadcast(None if more is None else bytes([more]), self.source) == b"\1"

    def stamp(self, inputs: Any, target: Any) -> int:
        """A check number of a batch: ranks that work on different ones must find out. Dicts may be in another order."""
        if self.crew.alone or self.source is not None:
            return 0
        found = 0
        batch = (inputs, target)
        for place, leaf in sorted(zip(leaf_places(batch), tree.leaves(batch), strict=True), key=itemgetter(0)):
            found = zlib.crc32(place.encode(), found)
            if isinstance(leaf, torch.Tensor):
                found = zlib.crc32(repr((tuple(leaf.shape), str(leaf.dtype))).encode(), found)
                # A device's tensor is not fetched for this, only its sum.
                content = raw(leaf) if leaf.device.type == "cpu" else repr(leaf.double().sum().item()).encode()
                found = zlib.crc32(content, found)
            elif isinstance(leaf, _PLAIN):
                found = zlib.crc32(repr(leaf).encode(), found)
        return found


def _packed(batch: Any) -> bytes:
    tensors: list[torch.Tensor] = []
    words = json.dumps(_word(batch, tensors)).encode()
    return to_bytes(Message(dict(enumerate(tensors)), words))


def _unpacked(data: bytes, device: torch.device) -> Any:
    message = from_bytes(data)
    return _meaning(json.loads(message.told), {at: t.to(device) for at, t in message.values.items()})


def _word(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A value as JSON: containers by a letter, tensors by their number."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["T", len(tensors) - 1]
    if type(value) in _PLAIN:
        return value
    if type(value) in (tuple, list):
        return ["t" if type(value) is tuple else "l", [_word(part, tensors) for part in value]]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["d", {key: _word(part, tensors) for key, part in value.items()}]
    raise InputError(
        "batches of tensors, numbers, words, tuples, lists and dicts, to be sent from rank 0",
        type(value).__name__,
        "give such data on every rank (data='every')",
    )


def _meaning(word: Any, tensors: dict[int, torch.Tensor]) -> Any:
    if not isinstance(word, list):
        return word
    kind, content = word
    if kind == "T":
        return tensors[content]
    if kind == "d":
        return {key: _meaning(part, tensors) for key, part in content.items()}
    parts = [_meaning(part, tensors) for part in content]
    return tuple(parts) if kind == "t" else parts
