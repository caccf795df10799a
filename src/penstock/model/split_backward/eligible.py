"""Decide which calls of a function can be deferred, and with what precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from penstock.model.split_backward.queue import WeightQueue

# Nodes that keep no tensor: the input gradient may pass through them, and the weight gradient a second time.
_STATELESS = frozenset(
    f"{name}Backward0"
    for name in (
        "Alias",
        "Clone",
        "Diagonal",
        "Expand",
        "Permute",
        "ReshapeAlias",
        "Select",
        "Slice",
        "Split",
        "SplitWithSizes",
        "Squeeze",
        "T",
        "ToCopy",
        "Transpose",
        "Unbind",
        "UnsafeSplit",
        "UnsafeView",
        "Unsqueeze",
        "View",
    )
)

_OURS = (Tensor, Parameter, FakeTensor)  # of subclasses only those that behave as a plain tensor


def plain(*tensors: Tensor | None) -> bool:
    """Whether tensors are ordinary, dense and real, and no mode observes or changes functions."""
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _OURS:
            return False
        if tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_quantized:
            return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if not torch._C._len_torch_function_stack():
        return True
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return all(type(mode) is DeviceContext for mode in modes)  # `set_default_device` is one


def leads_to_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter that requires grad, or a view or cast of one.

    A computed weight (such as weight norm) is not: its graph can be run backward only once, and the input gradient may
    have to. Neither is a leaf that is no Parameter: it may be an input of the stage, whose gradient is needed now.
    """
    if tensor.grad_fn is None:
        return isinstance(tensor, Parameter)
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _STATELESS:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), Parameter)


def can_wait(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether weight and bias belong to parameters, and the call is an ordinary one."""
    if not (isinstance(weight, Tensor) and weight.requires_grad and plain(x, weight, bias)):
        return False
    return leads_to_parameter(weight) and (bias is None or not bias.requires_grad or leads_to_parameter(bias))


def as_autocast(
    queue: WeightQueue, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the tensors in the precision of autocast; the cast is part of the graph."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    cast = partial(_cast, queue, kind, dtype)
    return cast(x), cast(weight), None if bias is None else cast(bias)


def _cast(queue: WeightQueue, kind: str, dtype: torch.dtype, tensor: Tensor) -> Tensor:
    if tensor.device.type != kind or not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
        return tensor
    # Autocast casts a leaf once and reuses the copy, so that gradients of several uses are added in low precision.
    keep = tensor.is_leaf and tensor.requires_grad and tensor.dtype is torch.float32
    if not (keep and torch.is_autocast_cache_enabled()):
        return tensor.to(dtype)
    key = (id(tensor), dtype)
    if key not in queue.casts:
        queue.casts[key] = (tensor, tensor.to(dtype))
    return queue.casts[key][1]
