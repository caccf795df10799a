"""What the user hands in step by step, understood: batches of a loader, and inputs that want a gradient."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError
from penstock.model import tree


def pairs(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """(inputs, target) of each batch; one that is a dict has its labels inside, if any."""
    try:
        every = iter(batches)
    except TypeError:
        came = type(batches).__name__
        raise InputError("a loader that can be iterated over", came, "give a list of batches or a DataLoader") from None
    for batch in every:
        if isinstance(batch, Mapping):  # of keywords, labels among them
            yield batch, None
            continue
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            came = f"{len(batch)} values" if isinstance(batch, (tuple, list)) else type(batch).__name__
            do = "yield a pair, whose target may be None, or a dict of the forward's keywords"
            raise InputError("a loader of (inputs, target)", came, do)
        yield batch[0], batch[1]


@contextmanager
def taken_by(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Around a call of the model's: arguments that its forward does not take get one message."""
    try:
        yield
    except TypeError:
        try:
            inspect.signature(model.forward).bind(*args, **kwargs)
        except TypeError as wrong:
            came = [type(value).__name__ for value in args] + [f"{name}=" for name in kwargs]
            raise InputError(
                f"inputs that {type(model).__name__}.forward takes",
                f"({', '.join(came)}): {wrong}",
                "give a tensor, a tuple of arguments or a dict of keywords; the target comes behind it, as in "
                "pipe.step(inputs, target)",
            ) from None
        raise


@dataclass
class Scaled:
    """What gradients are multiplied by in the end."""

    by: float = 1.0


@contextmanager
def input_gradients(inputs: Any, alone: bool) -> Iterator[Scaled]:
    """Around a step: inputs that require grad get the gradient of the mean, on top of what they had.

    Backwards start from something else, which only the end of a step can put right.
    """
    wanting = [tensor for tensor in tree.tensors(inputs) if tensor.requires_grad]
    _require_leaves(wanting, alone)
    before = [tensor.grad for tensor in wanting]
    for tensor in wanting:
        tensor.grad = None
    scaled = Scaled()
    try:
        yield scaled
        for tensor, old in zip(wanting, before, strict=True):
            if tensor.grad is not None:
                fresh = tensor.grad.mul_(scaled.by)
                tensor.grad = fresh if old is None else old.add_(fresh)
            else:
                tensor.grad = old
    except BaseException:
        for tensor, old in zip(wanting, before, strict=True):
            tensor.grad = old
        raise


def _require_leaves(wanting: list[torch.Tensor], alone: bool) -> None:
    for tensor in wanting:
        if not tensor.is_leaf:
            raise InputError(
                "inputs without a history of their own",
                f"one of shape {tuple(tensor.shape)} that {tensor.grad_fn.name() if tensor.grad_fn else '?'} made",
                "detach it, or make what computes it part of the model",
            )
        if not alone:
            raise InputError(
                "inputs that want no gradient, as each rank would have a part of it",
                f"one of shape {tuple(tensor.shape)} that does",
                "detach it, or run in one process",
            )
