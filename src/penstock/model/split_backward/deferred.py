"""A call with a split backward: the input gradient is computed now, those of weight and bias later through the
queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import InputError
from penstock.model.split_backward.operations import Operation
from penstock.model.split_backward.queue import Owed, WeightQueue, root_of

# Saved with every call. A recomputation outside `deferring` saves other tensors, which may have the same shapes, such
# as the transpose of a square weight. This one has a unique shape, so that checkpoint detects the difference.
_MARK = torch.empty(0, 0, 0, device="cpu")


@dataclass(slots=True)
class _Call:
    """The call, hidden from autograd: a Function must not return None for a parameter, as its hooks would run on it."""

    queue: WeightQueue
    operation: Operation
    weight: Tensor | None
    bias: Tensor | None
    owed: Owed
    root: Tensor


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor, call: _Call) -> Tensor:
        weight, bias = call.weight, call.bias
        call.weight = call.bias = None  # only saved tensors are kept, so that checkpoint and offloading see them
        assert weight is not None
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(_MARK, x, weight if call.operation.saves_weight else None)
        return call.operation.result(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None
        call: _Call = ctx.call
        _, x, weight = ctx.saved_tensors
        gradient = call.operation.fold(gradient)
        if torch._C._will_engine_execute_node(call.queue.gate_node):
            if torch.is_grad_enabled():
                raise InputError(
                    "a backward that is not itself differentiated",
                    "create_graph=True while the weight gradients are put off",
                    "run this stage's backward whole",
                )
            held = call.operation.holds(gradient, x.detach(), weight)
            call.queue.add(call.owed, call.root, held)
        needs_x = ctx.needs_input_grad[1]
        return None, call.operation.input_gradient(gradient, x, weight) if needs_x else None, None


def defer(queue: WeightQueue, operation: Operation, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the operation's result; its backward leaves the gradients of weight and bias to the queue."""
    owed = Owed(operation.weight_gradient)
    call = _Call(queue, operation, weight, bias, owed, root_of(owed, weight, bias))
    return _Deferred.apply(queue.gate, x, call)  # type: ignore[no-untyped-call,no-any-return]
