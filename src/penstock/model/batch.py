"""Inputs of a step: cut into micro-batches by rows, and results of micro-batches put together again."""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import InputError
from penstock.model import tree


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The model's arguments: a dict is keywords, a tuple or list positions, anything else one argument."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def require_device(inputs: Any, home: torch.device) -> None:
    """Refuse inputs that lie elsewhere than the model."""
    for tensor in tree.tensors(inputs):
        if tensor.device != home:
            raise InputError(f"inputs on the model's device {home}", tensor.device, f"move them with .to('{home}')")


def rows_of(*values: Any) -> int:
    """Rows of a batch: the first dimension of every tensor in it, which must be the same."""
    sizes = {tensor.shape[0] for value in values for tensor in tree.tensors(value) if tensor.dim() > 0}
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
    """First and last row of each micro-batch, as even as can be."""
    if rows < parts:
        raise InputError(
            f"a batch of at least {parts} rows, one for each micro-batch",
            rows,
            "use a larger batch or fewer micro-batches",
        )
    return [(rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]


def piece(value: Any, first: int, last: int) -> Any:
    """Some rows of a value: of its tensors; everything else as it is."""
    return tree.replace(value, lambda tensor: tensor[first:last] if tensor.dim() > 0 else tensor)


def join(results: list[Any], rows: list[int]) -> Any:
    """One result from those of the micro-batches: rows put behind each other, scalars averaged by rows."""
    if len(results) == 1:
        return results[0]
    columns = list(zip(*(list(tree.tensors(result)) for result in results), strict=True))
    joined = iter([_together(column, rows) for column in columns])
    return tree.replace(results[0], lambda _: next(joined))


def _together(parts: tuple[torch.Tensor, ...], rows: list[int]) -> torch.Tensor:
    first = parts[0]
    for dim in range(first.dim()):  # rows come first, or behind layers as in the state of an LSTM
        if all(part.shape[dim] == count for part, count in zip(parts, rows, strict=True)):
            return torch.cat(parts, dim)
    if first.dim() == 0 and first.is_floating_point():
        return torch.stack([part * count for part, count in zip(parts, rows, strict=True)]).sum() / sum(rows)
    if all(torch.equal(part, first) for part in parts):
        return first  # nothing of the batch: a table of positions, say
    if first.dim() > 0 and all(
        part.shape[0] * rows[0] == first.shape[0] * count for part, count in zip(parts, rows, strict=True)
    ):
        return torch.cat(parts)  # rows folded with another dimension, as in view(rows * length, -1)
    shapes = ", ".join(str(tuple(part.shape)) for part in parts)
    raise InputError("results that have the batch's rows", f"shapes {shapes}", "return rows in the first dimension")
