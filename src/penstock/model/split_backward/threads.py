"""The queues for deferred weight gradients: every thread has its own, the innermost last.

A backward on a CUDA device runs on a thread of autograd, and a checkpoint may recompute there. So hooks on the first
nodes of a backward register, on that thread, which queue the backward belongs to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.model.split_backward.queue import WeightQueue


class _Own(threading.local):
    def __init__(self) -> None:
        self.queues: list[WeightQueue] = []


own = _Own()
_backwards: dict[int, WeightQueue] = {}  # by the number that autograd gives a backward while it runs


def _mine() -> WeightQueue | None:
    if own.queues:
        return own.queues[-1]
    return _backwards.get(torch._C._current_graph_task_id()) if _backwards else None


def current() -> WeightQueue | None:
    """Return the queue for weight gradients; None where there is no graph, or they are not deferred."""
    return _mine() if torch.is_grad_enabled() else None


@contextmanager
def telling(roots: Sequence[Tensor | GradientEdge]) -> Iterator[None]:
    """Register this thread's queue for a backward from these roots."""
    queue = _mine()
    if queue is None:
        yield
        return
    told: list[int] = []

    def tell(_: Any) -> None:
        told.append(torch._C._current_graph_task_id())
        _backwards[told[-1]] = queue

    edges = [get_gradient_edge(root) if isinstance(root, Tensor) else root for root in roots if _grows(root)]
    hooks = [edge.node.register_prehook(tell) for edge in edges]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for number in told:
            _backwards.pop(number, None)


def _grows(root: Tensor | GradientEdge) -> bool:
    return not isinstance(root, Tensor) or root.requires_grad
