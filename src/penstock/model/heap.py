"""Bytes of tensors: each storage counts once, and only the part that the tensors cover, so that a slice does not count
as its whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.model.written import place


class Heap:
    """Tensors by their storages."""

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        self.ignored = {place(tensor) for tensor in ignored}
        self.parts: dict[int, dict[tuple[Any, ...], int]] = {}
        self.whole: dict[int, int] = {}

    def add(self, tensor: Tensor) -> None:
        at = place(tensor)
        if at and at not in self.ignored:
            where = (tensor.storage_offset(), tensor.dtype, tensor.numel())
            self.parts.setdefault(at, {})[where] = tensor.numel() * tensor.element_size()
            self.whole[at] = tensor.untyped_storage().nbytes()

    @property
    def bytes(self) -> int:
        return sum(min(self.whole[at], sum(parts.values())) for at, parts in self.parts.items())

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Add what autograd saves within the context."""

        def pack(tensor: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():  # a walk would take these for calls of the model
                self.add(tensor)
                return tensor.detach()  # a graph that holds its own results would never be freed

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of the tensors among the values that have memory."""
    tensors = [value for value in values if isinstance(value, Tensor) and not value.is_meta]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
