"""Check that a loss is computed from what the last stage has: the model's result and the target.

A loss that reads attributes of modules (a balance loss, in a list or an attribute) would find those of another
micro-batch, or none on another rank. The first step checks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.errors import SplitError
from penstock.model import tree
from penstock.model.loss import Loss

_ADVICE = "return what the loss needs from the model's forward, and take it from the result"


def next_node() -> int:
    """Return a number below those of all graph nodes that this thread will create."""
    node = torch.zeros((), requires_grad=True).clone().grad_fn
    assert node is not None
    return int(node._sequence_nr())


def own_loss(find: Callable[[], Any], since: int, given: Any, others: dict[tuple[int, str], str]) -> Any:
    """Call `find` and return its result, or raise if it is not computed from `given` in a graph begun after `since`.

    `others`: attributes that the forwards of other stages set, by module and name, and their description.
    """
    with _unread(others):
        found = find()
    if isinstance(found, Loss):
        _require_newer(found.value, since, {tensor.grad_fn for tensor in tree.tensors(given)})
    return found


def _require_newer(value: torch.Tensor, since: int, met: set[Any]) -> None:
    left = [value.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in met or type(node).__name__ == "AccumulateGrad":
            continue
        if node._sequence_nr() < since:
            raise SplitError(
                "a loss made of the model's result and the target",
                f"one that reaches, by a {node.name()}, into a graph from before: what a module has kept on the side",
                _ADVICE,
            )
        met.add(node)
        left += [after for after, _ in node.next_functions]


@contextmanager
def _unread(others: dict[tuple[int, str], str]) -> Iterator[None]:
    if not others:
        yield
        return

    def looked(module: nn.Module, name: str) -> Any:
        found = others.get((id(module), name))
        if found is not None:
            raise SplitError(
                "a loss made of the model's result and the target",
                f"one that reads {found}, which the forward of another stage sets",
                _ADVICE,
            )
        return object.__getattribute__(module, name)

    nn.Module.__getattribute__ = looked  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del nn.Module.__getattribute__
