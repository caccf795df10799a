"""Batches from the user's loader, with a checksum that all ranks compare, and inputs that require a gradient."""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from penstock.comm.transport.interface import Message
from penstock.comm.transport.wire import from_bytes, to_bytes
from penstock.errors import InputError
from penstock.model import tree
from penstock.model.naming import leaf_places
from penstock.training.processes import Ranks, raw


def pairs(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield (inputs, target) of each batch; a dict holds its labels itself, if any."""
    try:
        every = iter(batches)
    except TypeError:
        came = type(batches).__name__
        raise InputError("a loader that can be iterated over", came, "give a list of batches or a DataLoader") from None
    for batch in every:
        if isinstance(batch, Mapping):  # keywords of the forward, with the labels
            yield batch, None
            continue
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            came = f"{len(batch)} values" if isinstance(batch, (tuple, list)) else type(batch).__name__
            do = "yield a pair, whose target may be None, or a dict of the forward's keywords"
            raise InputError("a loader of (inputs, target)", came, do)
        yield batch[0], batch[1]


@contextmanager
def taken_by(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Call the model inside: arguments that its forward does not take raise one clear error."""
    try:
        yield
    except TypeError:
        try:
            inspect.signature(model.forward).bind(*args, **kwargs)
        except TypeError as wrong:
            came = [type(value).__name__ for value in args] + [f"{name}=" for name in kwargs]
            raise InputError(
                f"inputs that {type(model).__name__}.forward takes",
                f"({', '.join(came)}): {wrong}",
                "give a tensor, a tuple of arguments or a dict of keywords; the target comes behind it, as in "
                "pipe.step(inputs, target)",
            ) from None
        raise


@dataclass
class Scaled:
    """Factor that the inputs' gradients are multiplied by at the end of a step."""

    by: float = 1.0


@contextmanager
def input_gradients(inputs: Any, alone: bool) -> Iterator[Scaled]:
    """Run a step inside: inputs that require grad get the gradient of the mean added to theirs.

    Backwards start from a scaled value, so the factor is known only at the end of the step.
    """
    requiring = [tensor for tensor in tree.tensors(inputs) if tensor.requires_grad]
    _require_leaves(requiring, alone)
    before = [tensor.grad for tensor in requiring]
    for tensor in requiring:
        tensor.grad = None
    scaled = Scaled()
    try:
        yield scaled
        for tensor, old in zip(requiring, before, strict=True):
            if tensor.grad is not None:
                fresh = tensor.grad.mul_(scaled.by)
                tensor.grad = fresh if old is None else old.add_(fresh)
            else:
                tensor.grad = old
    except BaseException:
        for tensor, old in zip(requiring, before, strict=True):
            tensor.grad = old
        raise


def _require_leaves(requiring: list[torch.Tensor], alone: bool) -> None:
    for tensor in requiring:
        if not tensor.is_leaf:
            raise InputError(
                "inputs without a history of their own",
                f"one of shape {tuple(tensor.shape)} that {tensor.grad_fn.name() if tensor.grad_fn else '?'} made",
                "detach it, or make what computes it part of the model",
            )
        if not alone:
            raise InputError(
                "inputs that want no gradient, as each rank would have a part of it",
                f"one of shape {tuple(tensor.shape)} that does",
                "detach it, or run in one process",
            )


_PLAIN = (type(None), bool, int, float, str)


class Feed:
    """Gives every rank its batches. `source` is the rank that has the data, None where all have it."""

    def __init__(self, ranks: Ranks, data: str, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self.source = None if data == "every" or ranks.alone else 0

    def one(self, inputs: Any, target: Any) -> tuple[Any, Any]:
        """Return one batch on every rank. A mapping, such as a tokenizer's result, becomes a dict."""
        inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        if self.source is None:
            return inputs, target
        is_source = self.ranks.world.rank == self.source
        if is_source and inputs is None:
            raise InputError("a batch on rank 0", "None", "give the data on rank 0, as data='rank0' says")
        packed = self.ranks.world.broadcast(_packed((inputs, target)) if is_source else None, self.source)
        return (inputs, target) if is_source else _unpacked(packed, self.device)

    def each(self, loader: Iterable[Any] | None) -> Iterator[tuple[Any, Any]]:
        """Yield all batches of a loader, which only the source needs."""
        if self.source is None or self.ranks.world.rank == self.source:
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
        return self.ranks.world.broadcast(None if more is None else bytes([more]), self.source) == b"\1"

    def stamp(self, inputs: Any, target: Any) -> int:
        """Return a checksum of a batch, by which ranks notice that theirs differ; the order of dicts is ignored."""
        if self.ranks.alone or self.source is not None:
            return 0
        checksum = 0
        batch = (inputs, target)
        for place, leaf in sorted(zip(leaf_places(batch), tree.leaves(batch), strict=True), key=itemgetter(0)):
            checksum = zlib.crc32(place.encode(), checksum)
            if isinstance(leaf, torch.Tensor):
                checksum = zlib.crc32(repr((tuple(leaf.shape), str(leaf.dtype))).encode(), checksum)
                # Of a tensor on a device only the sum is fetched.
                content = raw(leaf) if leaf.device.type == "cpu" else repr(leaf.double().sum().item()).encode()
                checksum = zlib.crc32(content, checksum)
            elif isinstance(leaf, _PLAIN):
                checksum = zlib.crc32(repr(leaf).encode(), checksum)
        return checksum


def _packed(batch: Any) -> bytes:
    tensors: list[torch.Tensor] = []
    words = json.dumps(_word(batch, tensors)).encode()
    return to_bytes(Message(dict(enumerate(tensors)), words))


def _unpacked(data: bytes, device: torch.device) -> Any:
    message = from_bytes(data)
    return _meaning(json.loads(message.metadata), {at: t.to(device) for at, t in message.values.items()})


def _word(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Encode a value as JSON: containers by a letter, tensors by their number."""
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
