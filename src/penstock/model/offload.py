"""Host memory for what a device has no room for: activations between forward and backward, and weights of waiting
stages.

Weights wait in pinned memory, to which `.data` points. What autograd saves of them is kept as a recipe, not as a
tensor, which would keep the first forward's copy on the device until its backward. Where the device is the host,
nothing is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Flag
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import InputError


class Offload(Flag):
    """The kind of data that is moved to host memory."""

    NOTHING = 0
    ACTIVATIONS = 1
    WEIGHTS = 2
    ALL = 3

    @classmethod
    def read(cls, asked: bool | str) -> Offload:
        named: dict[bool | str, Offload] = {False: cls.NOTHING, True: cls.ACTIVATIONS}
        named |= {"activations": cls.ACTIVATIONS, "weights": cls.WEIGHTS, "all": cls.ALL}
        if asked not in named:
            raise InputError("offload to be True, False, activations, weights or all", repr(asked), "choose one")
        return named[asked]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, pinned so that the way back is fast. Expanded dimensions stay expanded."""
    core = _unexpanded(tensor)
    if torch._debug_has_internal_overlap(core) != 0:  # overlapping windows, or gaps
        core = core.contiguous()
    kept = torch.empty_strided(core.size(), core.stride(), dtype=core.dtype, device="cpu", pin_memory=core.is_cuda)
    return kept.copy_(core).expand(tensor.size())


def to_device(kept: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor that `to_host` has copied, on the device."""
    return _unexpanded(kept).to(device, non_blocking=True).expand(kept.size())


def _unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    for dim, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def saving(what: Offload, parameters: Iterable[nn.Parameter]) -> saved_tensors_hooks:
    """Return a context for a forward in which tensors that autograd saves are kept as `what` says."""
    owners = {p.untyped_storage().data_ptr(): p for p in parameters if p.numel()}

    def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        with torch._C.DisableTorchFunction():  # a walk would take these for calls of the model
            if tensor.is_meta or tensor.layout is not torch.strided:
                return lambda: tensor
            return _recipe(tensor, owners.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None, what)

    def unpack(recipe: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return recipe()  # type: ignore[no-any-return]

    return saved_tensors_hooks(pack, unpack)


def _recipe(tensor: torch.Tensor, owner: nn.Parameter | None, what: Offload) -> Callable[[], torch.Tensor]:
    """Return a function that returns the tensor again."""
    if owner is not None and owner.dtype is tensor.dtype and within(tensor, owner):
        offset = tensor.storage_offset() - owner.storage_offset()
        size, stride = tensor.size(), tensor.stride()
        return lambda: owner.detach().as_strided(size, stride, owner.storage_offset() + offset)
    if Offload.ACTIVATIONS in what:
        kept, device = to_host(tensor), tensor.device
        return lambda: to_device(kept, device)
    return lambda: tensor


def within(tensor: torch.Tensor, owner: nn.Parameter) -> bool:
    """Whether a view lies in its owner's part of the storage; parameters may share one flat buffer."""
    first = tensor.storage_offset() - owner.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return owner.is_contiguous() and first >= 0 and last < owner.numel()


class Swap:
    """The weights of one stage at a time on the device; those of others wait in host memory."""

    def __init__(self, used: list[list[nn.Parameter]], device: torch.device) -> None:
        self.used, self.device = used, device
        every = {id(p): p for stage in used for p in stage}
        self.idle = device.type == "cpu"  # whether the device is the host
        self.host = {} if self.idle else {key: (to_host(p.data), p._version) for key, p in every.items()}
        if not self.idle:
            for key, p in every.items():
                p.data = self.host[key][0]
        self.here: dict[int, nn.Parameter] = {}

    def turn(self, stage: int) -> None:
        """Move the weights of a stage that runs next to the device."""
        if not self.idle:
            self._have({id(p): p for p in self.used[stage]})

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Move all weights to the device, for a run of the whole model."""
        before = dict(self.here)
        if not self.idle:
            self._have({id(p): p for stage in self.used for p in stage})
        try:
            yield
        finally:
            self._have(before)

    def _have(self, wanted: dict[int, nn.Parameter]) -> None:
        for key in [key for key in self.here if key not in wanted]:
            self._park(key, self.here.pop(key))
        for key, p in wanted.items():
            if key not in self.here:
                self.host[key] = (p.data, p._version)
                p.data = p.data.to(self.device, non_blocking=True)
                self.here[key] = p

    def _park(self, key: int, p: nn.Parameter) -> None:
        host, version = self.host[key]
        if p._version != version:  # it was written to, by an optimizer or a checkpoint
            host.copy_(p.data)
        p.data = host
