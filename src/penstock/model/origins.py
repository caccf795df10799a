"""Distinguish tensors of a forward that depend on data from those computed from weights and constants alone.

Autograd does not show it: beside weights, it ignores what needs no gradient, be it a number, a buffer or a batch. So
the operations of a forward are observed. An unknown tensor is data, unless it is known to be fixed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.model import tree


class Made(NamedTuple):
    """The weights and the operation that a tensor was computed from; a constant has no weights."""

    weights: frozenset[nn.Parameter]
    by: str


class Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The origins of the tensors of one forward, by storage; a weak reference keeps its identity from being reused."""

    def __init__(self, weights: Iterable[nn.Parameter], constants: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: dict[StorageWeakRef, Made | None] = {}
        for constant in constants:
            self._note(constant, Made(frozenset(), ""))
        for weight in weights:
            self._note(weight, Made(frozenset((weight,)), ""))

    def of(self, tensor: torch.Tensor) -> Made | None:
        """Return a tensor's origin; None for data and results of it. An unknown scalar counts as a constant."""
        plain = None if tensor.dim() else Made(frozenset(), "")
        return self.known.get(_storage(tensor), plain) if _has_storage(tensor) else Made(frozenset(), "")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # these are not calls of the model
            given = [self.of(tensor) for tensor in tree.tensors((args, kwargs))]
            result = func(*args, **(kwargs or {}))
            made = _joined(given, func._overloadpacket.__name__)
            for tensor in tree.tensors(result):
                self._note(tensor, made)
        return result

    def _note(self, tensor: torch.Tensor, made: Made | None) -> None:
        if _has_storage(tensor):
            before = self.known.get(_storage(tensor))
            if made is not None and before is not None:  # a view, or a change in place
                made = Made(before.weights | made.weights, before.by or made.by)
            self.known[_storage(tensor)] = made


def _joined(given: list[Made | None], by: str) -> Made | None:
    known = [made for made in given if made is not None]
    if len(known) < len(given):
        return None
    shape_only = by.endswith("_like") or by.startswith("new_")
    return Made(frozenset() if shape_only else frozenset().union(*(made.weights for made in known)), by)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
