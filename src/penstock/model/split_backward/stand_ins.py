"""Stand-ins for torch's functions: they do the same, unless their thread defers weight gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from penstock.errors import InputError
from penstock.model.split_backward import threads
from penstock.model.split_backward.convolutions import convolution, transposed_convolution
from penstock.model.split_backward.deferred import defer
from penstock.model.split_backward.eligible import as_autocast, can_wait
from penstock.model.split_backward.operations import Embedding, Linear

_linear, _addmm, _embedding = torch._C._nn.linear, torch.addmm, torch.embedding
_grad, _backward = torch.autograd.grad, torch.autograd.backward


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.compiler.is_compiling() or (queue := threads.current()) is None or not can_wait(input, weight, bias):
        return _linear(input, weight, bias)
    x, w, b = as_autocast(queue, input, weight, bias)
    fits = x.dim() > 0 and w.dim() == 2 and w.numel() and x.size(-1) == w.size(1) and x.dtype == w.dtype
    if not fits or (b is not None and (b.shape != w.shape[:1] or b.dtype != w.dtype)):
        return _linear(input, weight, bias)  # torch's rarer cases, and its errors
    fused = x.dim() == 2 or x.is_contiguous()
    by_rows = w.stride(1) == 1 and w.stride(0) == w.size(1)
    operation = Linear((*x.shape[:-1], w.size(0)), fused, not by_rows)
    return defer(queue, operation, x if x.dim() == 2 else x.reshape(-1, x.size(-1)), w, b)


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, out: Any = None) -> Tensor:
    """GPT-2's linear layer, whose weight is transposed."""
    ours = beta == 1 and alpha == 1 and out is None and not torch.compiler.is_compiling()
    if not ours or (queue := threads.current()) is None or not can_wait(mat1, mat2, input):
        return _addmm(input, mat1, mat2, beta=beta, alpha=alpha, **({} if out is None else {"out": out}))
    x, w, b = as_autocast(queue, mat1, mat2, input)
    fits = x.dim() == w.dim() == 2 and w.numel() and x.size(1) == w.size(0) and x.dtype == w.dtype
    if not fits or b is None or b.shape != w.shape[1:] or b.dtype != w.dtype:
        return _addmm(input, mat1, mat2)
    by_columns = w.stride(0) == 1 and w.stride(1) == w.size(0)
    return defer(queue, Linear((x.size(0), w.size(1)), True, not by_columns), x, w.t(), b)


def embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    ours = not sparse and not torch.compiler.is_compiling()
    if not ours or (queue := threads.current()) is None or not can_wait(indices, weight, None) or weight.dim() != 2:
        return _embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)
    return defer(queue, Embedding(weight.size(0), padding_idx, scale_grad_by_freq), indices, weight, None)


def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise for a parameter while weight gradients are deferred: torch would return nothing, or a part of its
    gradient."""
    asked = _several(inputs)
    if threads.own.queues and any(isinstance(one, Parameter) for one in asked):
        raise InputError(
            "autograd.grad with respect to activations, while weight gradients are put off",
            "autograd.grad with respect to a parameter",
            "run this stage's backward whole",
        )
    with threads.telling(_several(outputs)):
        return _grad(outputs, asked, *args, **kwargs)


def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    with threads.telling(_several(tensors)):
        _backward(tensors, *args, **kwargs)


def _several(given: Any) -> list[Any]:
    return [given] if isinstance(given, (Tensor, GradientEdge)) else list(given)


Place = tuple[Any, str, Callable[..., Any], Callable[..., Any]]  # module, name, torch's function, stand-in


def _places() -> list[Place]:
    # Not `torch._C._nn.linear`: torch takes the function that it passes to a TorchFunctionMode from there.
    places: list[Place] = [
        (F, "linear", _linear, linear),
        (torch, "addmm", _addmm, addmm),
        (torch, "embedding", _embedding, embedding),  # called by F.embedding
        (torch.autograd, "grad", _grad, grad),
        (torch.autograd, "backward", _backward, backward),  # called by Tensor.backward
    ]
    for n in (1, 2, 3):
        for name, make in ((f"conv{n}d", convolution), (f"conv_transpose{n}d", transposed_convolution)):
            torchs = getattr(torch, name)
            ours = make(torchs, n)
            places += [(torch, name, torchs, ours), (F, name, torchs, ours)]
    return [place for place in places if place[0] is torch.autograd or isinstance(place[2], BuiltinFunctionType)]


PLACES = _places()
_OURS = {torchs: ours for _, _, torchs, ours in PLACES}


def stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in for a torch function, for a TorchFunctionMode, which gets torch's; any other function
    unchanged."""
    return _OURS.get(function, function)
