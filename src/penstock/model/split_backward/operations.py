"""The operations whose weight gradient can be deferred: linear, convolution, embedding.

Each has three formulas: the result, the gradient of its input, and the gradients of its weight and bias. They are those
of PyTorch's backward, in the same order and layout, so that results have equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.model.split_backward.queue import Gradients

# Overloads are looked up once: that costs more than a small layer's product.
_addmm = torch.ops.aten.addmm.default
_convolution_backward = torch.ops.aten.convolution_backward.default
_embedding = torch.ops.aten.embedding.default
_embedding_backward = torch.ops.aten.embedding_dense_backward.default
_unsafe_view = torch.ops.aten._unsafe_view.default


class Operation(Protocol):
    """The settings and formulas of one call."""

    saves_weight: bool

    def result(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def fold(self, gradient: Tensor) -> Tensor:
        """Return the output's gradient in the shape that both formulas expect."""
        ...

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...

    def holds(self, gradient: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
        """Return the tensors that the weight gradient needs."""
        ...

    def weight_gradient(self, *held: Tensor, needed: tuple[bool, ...]) -> Gradients: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x wᵀ + b, with x folded to a matrix; y is unfolded to `shape`."""

    shape: tuple[int, ...]
    fused: bool  # the bias is added inside the product, as torch does where x is a matrix in memory
    transposed: bool  # wᵀ is contiguous; torch then computes the transposed gradient

    saves_weight = True

    def result(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.fused and bias is not None:
            y: Tensor = _addmm(bias, x, weight.t())
        else:
            y = torch.mm(x, weight.t())
            if bias is not None:
                y += bias
        # Not a view: a view that a Function creates and returns may not be changed in place.
        return y if len(self.shape) == 2 else _unsafe_view(y, self.shape)

    def fold(self, gradient: Tensor) -> Tensor:
        return gradient if gradient.dim() == 2 else gradient.reshape(-1, self.shape[-1])

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if _by_columns(x):
            return weight.t().mm(gradient.t()).t()
        return gradient.mm(weight)

    def holds(self, gradient: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
        return gradient, x

    def weight_gradient(self, *held: Tensor, needed: tuple[bool, ...]) -> Gradients:
        gradient, x = held
        by_weight = x.t().mm(gradient).t() if self.transposed else gradient.t().mm(x)
        return by_weight, gradient.sum(0) if needed[1] else None


@dataclass(frozen=True, slots=True)
class Convolution:
    """Convolutions of one to three dimensions and their transposes, on a batch."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int
    bias_size: list[int] | None

    saves_weight = True

    def _settings(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    def result(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *self._settings())

    def fold(self, gradient: Tensor) -> Tensor:
        return gradient

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        found = _convolution_backward(gradient, x, weight, self.bias_size, *self._settings(), [True, False, False])
        return found[0]  # type: ignore[no-any-return]

    def holds(self, gradient: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
        # The weight is kept for its shape and layout. Its values are not read, so an update before W is harmless.
        assert weight is not None
        return gradient, x, weight if isinstance(weight, torch.nn.Parameter) else weight.data

    def weight_gradient(self, *held: Tensor, needed: tuple[bool, ...]) -> Gradients:
        return _convolution_backward(*held, self.bias_size, *self._settings(), [False, True, needed[1]])[1:]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of a table; x holds their indices."""

    rows: int
    padding_idx: int
    scale_grad_by_freq: bool

    saves_weight = False  # and must not: max_norm changes the table in place before every call

    def result(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _embedding(weight, x, self.padding_idx, self.scale_grad_by_freq, False)  # type: ignore[no-any-return]

    def fold(self, gradient: Tensor) -> Tensor:
        return gradient

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        raise AssertionError("numbers of rows have no gradient")

    def holds(self, gradient: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
        return gradient, x

    def weight_gradient(self, *held: Tensor, needed: tuple[bool, ...]) -> Gradients:
        return _embedding_backward(*held, self.rows, self.padding_idx, self.scale_grad_by_freq), None


def _by_columns(x: Tensor) -> bool:
    return x.stride(0) == 1 and x.stride(1) == x.size(0)
