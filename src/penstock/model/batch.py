"""Split the inputs of a step into micro-batches by rows, and join the results of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from penstock.errors import InputError
from penstock.model import tree

_WORDS = (bool, int, float, complex, str, bytes, type(None))


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the model's arguments: a dict is keywords, a tuple or list positional, anything else a single argument."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def require_device(inputs: Any, home: torch.device) -> None:
    """Raise if inputs are on another device than the model."""
    for tensor in tree.tensors(inputs):
        if tensor.device != home:
            raise InputError(f"inputs on the model's device {home}", tensor.device, f"move them with .to('{home}')")


def rows_of(*values: Any) -> int:
    """Return the rows of a batch: the first dimension of every tensor in it, which must be the same."""
    sizes = {tensor.shape[0] for value in values for tensor in tree.tensors(value) if tensor.dim() > 0}
    if not sizes:
        leaves = [leaf for value in values for leaf in tree.leaves(value)]
        sizes = {len(leaf) for leaf in leaves if isinstance(leaf, np.ndarray) and leaf.ndim}
    if not sizes:
        raise InputError("inputs with at least one tensor that has rows", "none", "give the batch as tensors")
    if len(sizes) > 1:
        raise InputError(
            "all inputs and targets to have the same number of rows", sorted(sizes), "make their first dimensions agree"
        )
    rows = int(sizes.pop())
    if rows == 0:
        raise InputError("a batch with rows", "an empty one", "skip empty batches")
    return rows


def spans(rows: int, parts: int) -> list[tuple[int, int]]:
    """Return the first and last row of each micro-batch, as even as possible."""
    if rows < parts:
        raise InputError(
            f"a batch of at least {parts} rows, one for each micro-batch",
            rows,
            "use a larger batch or fewer micro-batches",
        )
    return [(rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]


def uneven_spans(rows: int, parts: int) -> list[tuple[int, int]]:
    """Return spans of at least two sizes, unless there is only one, so that `join` can recognize row dimensions in the
    results."""
    parts = min(parts, rows)
    if parts == rows:
        parts = max(parts - 1, 1)
    even = spans(rows, parts)
    if parts == 1 or len({last - first for first, last in even}) > 1:
        return even
    ends = [0, *(last + 1 for _, last in even[:-1]), rows]
    return list(pairwise(ends))


def piece(value: Any, first: int, last: int, rows: int | None = None) -> Any:
    """Return some rows of a value: of its tensors, and of arrays and lists with one entry for each row; everything else
    unchanged.

    `rows` is the number in the batch; by default that of the value's tensors.
    """
    if rows is None:
        sizes = {tensor.shape[0] for tensor in tree.tensors(value) if tensor.dim() > 0}
        rows = sizes.pop() if len(sizes) == 1 else None
    if _is_call(value):
        args, kwargs = value
        return tuple(_cut(part, first, last, rows) for part in args), _cut(kwargs, first, last, rows)
    return _cut(value, first, last, rows)


def _cut(value: Any, first: int, last: int, rows: int | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value[first:last] if value.dim() > 0 else value
    if isinstance(value, np.ndarray):
        return value[first:last] if value.ndim and len(value) == rows else value
    if _has_one_a_row(value, rows):
        return value[first:last]
    return tree.mapped(value, lambda part: _cut(part, first, last, rows))


def _is_call(value: Any) -> bool:
    """Whether a value is the arguments of a call, whose number is unrelated to rows."""
    return type(value) is tuple and len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict


def _has_one_a_row(value: Any, rows: int | None) -> bool:
    """Whether a value is a list of plain values as long as the batch. Tuples only count if they hold strings: (224,
    224) is a size."""
    if not isinstance(value, (list, tuple)) or len(value) != rows or tree.tensors(value):
        return False
    return isinstance(value, list) or all(isinstance(part, str) for part in value)


class ApartError(InputError):
    """Results of micro-batches that cannot be joined: run the batch as one."""

    def __init__(self, came: str) -> None:
        super().__init__(
            "results of micro-batches that can be put together: tensors with rows in one dimension",
            came,
            "return such tensors, or use one micro-batch",
        )


def join(results: list[Any], rows: list[int], sure: bool = False) -> Any:
    """Join the results of the micro-batches.

    With `sure`, tensors are joined along the dimension that changes with the rows (see `uneven_spans`), equal values
    are kept, and others are refused. Without, the first dimension that looks like rows is used, and scalars are
    averaged by rows.
    """
    if len(results) == 1:
        return results[0]
    every = [tree.leaves(result) for result in results]
    if len({len(leaves) for leaves in every}) > 1:
        raise ApartError("containers of different lengths")
    together = _surely if sure else _likely
    joined = iter([together(column, rows) for column in zip(*every, strict=True)])
    return tree.replace_leaves(results[0], lambda _: next(joined))


def _surely(parts: tuple[Any, ...], rows: list[int]) -> Any:
    first = parts[0]
    if not all(isinstance(part, torch.Tensor) for part in parts):
        if isinstance(first, _WORDS) and any(part != first for part in parts):
            raise ApartError(f"{first!r} in one micro-batch and something else in another")
        return first
    dims = _row_dimensions(parts, rows)
    if len(dims) == 1 and all(_without(part, dims[0]) == _without(first, dims[0]) for part in parts):
        return torch.cat(parts, dims[0])
    if not dims and all(part.shape == first.shape and torch.equal(part, first) for part in parts):
        return first  # independent of the batch, such as a table of positions
    raise ApartError(f"shapes {_shapes(parts)} for {', '.join(map(str, rows))} rows")


def _row_dimensions(parts: tuple[torch.Tensor, ...], rows: list[int]) -> list[int]:
    """Return the dimensions that are proportional to the rows, also where rows are folded with another, as in view(rows
    * length, -1)."""
    first = parts[0]
    if len(set(rows)) == 1 or any(part.dim() != first.dim() for part in parts):
        return []
    return [
        dim
        for dim in range(first.dim())
        if first.shape[dim]
        and all(part.shape[dim] * rows[0] == first.shape[dim] * count for part, count in zip(parts, rows, strict=True))
    ]


def _without(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])


def _likely(parts: tuple[Any, ...], rows: list[int]) -> Any:
    first = parts[0]
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return first
    for dim in range(first.dim()):  # rows come first, or behind layers as in the state of an LSTM
        if all(part.shape[dim] == count for part, count in zip(parts, rows, strict=True)):
            return torch.cat(parts, dim)
    if first.dim() == 0 and first.is_floating_point():
        return torch.stack([part * count for part, count in zip(parts, rows, strict=True)]).sum() / sum(rows)
    if all(part.shape == first.shape and torch.equal(part, first) for part in parts):
        return first
    if first.dim() > 0 and all(
        part.shape[0] * rows[0] == first.shape[0] * count for part, count in zip(parts, rows, strict=True)
    ):
        return torch.cat(parts)
    raise ApartError(f"shapes {_shapes(parts)} for {', '.join(map(str, rows))} rows")


def _shapes(parts: tuple[torch.Tensor, ...]) -> str:
    return ", ".join(str(tuple(part.shape)) for part in parts)
