"""The deferred weight gradients of one micro-batch, between its input gradient and its W.

Every intercepted call leaves a root: an empty tensor whose graph node leads to the call's weight and bias, through
their views and casts. The input gradient gives the node the tensors it needs; `run` is one ordinary backward from all
roots. So autograd itself adds the gradients of one parameter, casts them, fires hooks once and accumulates into
`.grad`, exactly as in a plain backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.errors import InputError

Gradients = tuple[Tensor | None, ...]  # of the weight and of the bias


class Owed:
    """The weight gradient of one call: a formula and, after the input gradient, its tensors."""

    __slots__ = ("formula", "held")

    def __init__(self, formula: Callable[..., Gradients]) -> None:
        self.formula = formula
        self.held: list[tuple[tuple[Tensor, int], ...]] = []  # tensors and their versions; one entry a backward

    def hold(self, tensors: tuple[Tensor, ...]) -> None:
        self.held.append(tuple((tensor, tensor._version) for tensor in tensors))

    def compute(self, needed: tuple[bool, ...]) -> Gradients:
        """Return the gradients, and release the tensors, so that memory is freed while the queue runs."""
        held, self.held = self.held, []
        total: Gradients = (None,) * len(needed)
        for pairs in held:
            for tensor, version in pairs:
                if tensor._version != version and not isinstance(tensor, Parameter):
                    raise InputError(
                        "layer inputs that nobody writes to before their weight gradient is computed",
                        f"a tensor of shape {tuple(tensor.shape)} changed in place after the input gradient",
                        "run the queue first, or write to a copy",
                    )
            found = self.formula(*(tensor for tensor, _ in pairs), needed=needed)
            total = tuple(b if a is None else a if b is None else a + b for a, b in zip(total, found, strict=True))
        return total


class _Root(torch.autograd.Function):
    """The node that computes a deferred gradient when the queue runs. It saves no tensor, only its edges."""

    @staticmethod
    def forward(ctx: Any, owed: Owed, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.owed = owed
        return weight.new_empty(0)  # on the weight's device, so that the node runs there and on this stream

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.owed.compute(ctx.needs_input_grad[1:])


def root_of(owed: Owed, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _Root.apply(owed, weight, bias)  # type: ignore[no-untyped-call,no-any-return]


class WeightQueue:
    """The weight gradients of one micro-batch. After `run`, it can be used for the next."""

    def __init__(self) -> None:
        # Every intercepted call takes the gate as an input. It gives a graph to a layer whose input needs no gradient,
        # and distinguishes a full backward from a user's `autograd.grad` in the forward, which never reaches the gate.
        self.gate = torch.empty(0, device="cpu", requires_grad=True)
        self.gate_node = torch.autograd.graph.get_gradient_edge(self.gate).node
        self.casts: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}  # the cache of autocast, for one region
        self._waiting: list[tuple[Owed, Tensor]] = []

    @property
    def waiting(self) -> int:
        """Number of calls whose weight gradient is yet to be computed."""
        return len(self._waiting)

    def add(self, owed: Owed, root: Tensor, tensors: tuple[Tensor, ...]) -> None:
        """Add a call's tensors; called from a backward, on any thread of autograd."""
        if not owed.held:
            self._waiting.append((owed, root))
        owed.hold(tensors)

    def run(self) -> None:
        """Compute every deferred gradient into its parameter's `.grad`, and release all tensors."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            roots = [root for _, root in waiting]
            torch.autograd.backward(roots, [root.detach() for root in roots])

    @property
    def held_bytes(self) -> int:
        """Bytes kept alive for `run`: layer inputs and output gradients, each storage counted once."""
        storages = {}
        for owed, _ in self._waiting:
            for pairs in owed.held:
                for tensor, _ in pairs:
                    if not isinstance(tensor, Parameter):  # alive anyway
                        storage = tensor.untyped_storage()
                        storages[storage._cdata] = storage.nbytes()
        return sum(storages.values())
