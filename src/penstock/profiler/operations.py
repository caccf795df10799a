"""What one call of an operator costs: operations by torch's own formulas, and bytes that go through memory.

Operations of matrix products, convolutions and attention are counted; all else is a matter of bytes. A view, or memory
that is only set aside, costs nothing. What is read and what is written counts once, whatever a cache may do.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from penstock.model import tree

aten = torch.ops.aten


class Kind(StrEnum):
    """How near an operator comes to what a device can do."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    MEMORY = "memory"  # bound by bytes alone


class Operation(NamedTuple):
    """One call, as far as its cost goes: equal calls are equal."""

    name: str
    kind: Kind
    dtype: torch.dtype
    flops: int
    bytes: int


# Memory is set aside, or seen in another shape, though the schema does not say so.
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
_GATHERED = frozenset((aten.embedding, aten.index_select, aten.index, aten.gather))  # of a table, the rows in use
_FILLED = frozenset((aten.copy_, aten.fill_, aten.zero_, aten.bernoulli_, aten.uniform_, aten.normal_))
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: 0,  # the place of the query in the arguments
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 1,
}
_RECURRENT = {aten.mkldnn_rnn_layer: 2, aten.mkldnn_rnn_layer_backward: 4}  # operations a row and weight
_CONVOLUTIONS = frozenset((aten.convolution, aten._convolution, aten.convolution_backward))


def operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Operation | None:
    """The cost of a call that gave `result`; None where no memory is touched."""
    if _is_free(func):
        return None
    packet = func._overloadpacket
    given, made = tree.tensors((args, kwargs)), tree.tensors(result)
    flops, kind = _flops(packet, args, kwargs, result)
    dtype = next((t.dtype for t in (*made, *given) if t.is_floating_point()), torch.int64)
    return Operation(str(packet), kind, dtype, flops, _bytes(packet, args, given, made))


def _is_free(func: Any) -> bool:
    known = _free.get(func)
    if known is None:
        known = _free[func] = func in _FREE or _is_view(func)
    return known


_free: dict[Any, bool] = {}


def _is_view(func: Any) -> bool:
    """A result that shares the memory of what was given, and changes nothing in it."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, Kind]:
    if packet in _ATTENTION:
        return _attention_flops(packet, args, kwargs), Kind.ATTENTION
    if packet in _RECURRENT:  # (steps, rows, ...), weights of inputs, weights of states, ...
        rows = args[0].shape[0] * args[0].shape[1]
        return _RECURRENT[packet] * rows * (args[1].numel() + args[2].numel()), Kind.MATMUL
    if packet is aten.convolution_backward:
        return _convolution_backward_flops(args), Kind.CONVOLUTION
    formula: Callable[..., int] | None = flop_registry.get(packet)
    if formula is None:
        return 0, Kind.MEMORY
    kind = Kind.CONVOLUTION if packet in _CONVOLUTIONS else Kind.MATMUL
    return int(formula(*args, **kwargs, out_val=result)), kind


def _convolution_backward_flops(args: tuple[Any, ...]) -> int:
    """Each gradient takes what the forward took; torch's formula forgets groups."""
    gradient, x, weight, transposed, wanted = *args[:3], args[7], args[-1]
    places = (x if transposed else gradient).shape
    once = 2 * int(places[0]) * int(places[2:].numel()) * int(weight.numel())
    return once * (bool(wanted[0]) + bool(wanted[1]))


def _attention_flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Two products forward; five backward, one of them the scores again. A causal kernel skips what is masked: half.

    Heads of keys and values may be fewer than those of queries; each query works with one of them all the same.
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


def _bytes(packet: Any, args: tuple[Any, ...], given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    written = sum(map(touched, made))
    if packet in _GATHERED:
        return 2 * written + sum(touched(t) for t in given[1:])
    if packet in _FILLED:
        return written + sum(touched(t) for t in given[1:])
    if packet is aten.convolution_backward:  # (gradient, input, weight, ...), and which gradients are wanted, last
        wanted = args[-1]
        given = [given[0], *([given[2]] if wanted[0] else []), *([given[1]] if wanted[1] else [])]
    return written + sum(touched(t) for t in {id(t): t for t in given}.values())


def touched(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, those that it repeats only once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else min(length, 1)
    return size
