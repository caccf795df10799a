"""The cost of one call of an operator: operations by torch's own formulas, and bytes that pass through memory.

Operations of matrix products, convolutions and attention are counted; all other operators are bound by bytes. A view or
an allocation costs nothing. Every byte read or written counts once, independently of caches.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from penstock.model import tree

aten = torch.ops.aten


class OperatorKind(StrEnum):
    """The kind of an operator, by which its share of a device's peak is known."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    MEMORY = "memory"  # bound by bytes alone


class OperatorCall(NamedTuple):
    """The cost of one call: calls of equal cost are equal."""

    name: str
    kind: OperatorKind
    dtype: torch.dtype
    flops: int
    bytes: int


# Allocations and views that the schema does not declare as such.
_FREE = frozenset(
    (
        torch.ops.prim.device.default,
        aten._unsafe_view.default,
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    )
)
# They read only some rows of a table.
_GATHERED = frozenset((aten.embedding, aten.index_select, aten.index, aten.gather))
_FILLED = frozenset((aten.copy_, aten.fill_, aten.zero_, aten.bernoulli_, aten.uniform_, aten.normal_))
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: 0,  # index of the query in the arguments
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 1,
}
_RECURRENT = {aten.mkldnn_rnn_layer: 2, aten.mkldnn_rnn_layer_backward: 4}  # operations a row and weight
_CONVOLUTIONS = frozenset((aten.convolution, aten._convolution, aten.convolution_backward))


def call_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OperatorCall | None:
    """Return the cost of a call that returned `result`; None where no memory is touched."""
    if _is_free(func):
        return None
    packet = func._overloadpacket
    given, outputs = tree.tensors((args, kwargs)), tree.tensors(result)
    flops, kind = _flops(packet, args, kwargs, result)
    dtype = next((t.dtype for t in (*outputs, *given) if t.is_floating_point()), torch.int64)
    return OperatorCall(str(packet), kind, dtype, flops, _bytes(packet, args, given, outputs))


def _is_free(func: Any) -> bool:
    free = _free.get(func)
    if free is None:
        free = _free[func] = func in _FREE or _is_view(func)
    return free


_free: dict[Any, bool] = {}


def _is_view(func: Any) -> bool:
    """Whether the result shares the memory of an argument, and changes nothing in it."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, OperatorKind]:
    if packet in _ATTENTION:
        return _attention_flops(packet, args, kwargs), OperatorKind.ATTENTION
    if packet in _RECURRENT:  # (steps, rows, ...), weights of inputs, weights of states, ...
        rows = args[0].shape[0] * args[0].shape[1]
        return _RECURRENT[packet] * rows * (args[1].numel() + args[2].numel()), OperatorKind.MATMUL
    if packet is aten.convolution_backward:
        return _convolution_backward_flops(args), OperatorKind.CONVOLUTION
    formula: Callable[..., int] | None = flop_registry.get(packet)
    if formula is None:
        return 0, OperatorKind.MEMORY
    kind = OperatorKind.CONVOLUTION if packet in _CONVOLUTIONS else OperatorKind.MATMUL
    return int(formula(*args, **kwargs, out_val=result)), kind


def _convolution_backward_flops(args: tuple[Any, ...]) -> int:
    """Return the operations of each requested gradient, as many as the forward's; torch's formula ignores groups."""
    gradient, x, weight, transposed, requested = *args[:3], args[7], args[-1]
    places = (x if transposed else gradient).shape
    once = 2 * int(places[0]) * int(places[2:].numel()) * int(weight.numel())
    return once * (bool(requested[0]) + bool(requested[1]))


def _attention_flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the operations of attention: two products forward; five backward, one of which repeats the scores. A
    causal kernel skips masked scores: half.

    Keys and values may have fewer heads than queries; each query still works with one of them.
    """
    first = _ATTENTION[packet]
    query, key, value = args[first : first + 3]
    scores: int = 2 * query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    products = (3, 2) if first else (1, 1)
    flops: int = scores * (products[0] * query.shape[3] + products[1] * value.shape[3])
    return flops // 2 if _is_causal(first, args, kwargs) else flops


def _is_causal(first: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    at = 7 if first else 4
    return bool(args[at] if len(args) > at else kwargs.get("is_causal", False))


def _bytes(packet: Any, args: tuple[Any, ...], given: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    written = sum(map(touched, outputs))
    if packet in _GATHERED:
        return 2 * written + sum(touched(t) for t in given[1:])
    if packet in _FILLED:
        return written + sum(touched(t) for t in given[1:])
    if packet is aten.convolution_backward:  # (gradient, input, weight, ..., which gradients are requested)
        requested = args[-1]
        given = [given[0], *([given[2]] if requested[0] else []), *([given[1]] if requested[1] else [])]
    return written + sum(touched(t) for t in {id(t): t for t in given}.values())


def touched(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; repeated ones count once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else min(length, 1)
    return size
