"""Stashing: a backward sees the weights of its forward, whatever has been updated in between, in every operator."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import penstock
import recursion_models
from operators import OPERATORS, ready, values
from penstock.core.action import Op
from penstock.core.check import check
from penstock.core.loop import Loop
from penstock.core.lowered_loop import LoweredLoop
from penstock.core.schedule import ScheduleRows
from penstock.engine.weights.select import VersionedWeights
from penstock.engine.weights.ties import TiedWeights
from penstock.model.split_backward import WeightQueue, deferring
from segments import MOMENTUM, WITHIN, Method, Recursion, off, optimizer, trained, weights

torch.set_num_threads(1)
STAGES = 4  # stage 0 of these runs three forwards before its first backward


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Taken away, so that the next backward begins anew."""
    found = {"x": x.grad} | {name: p.grad for name, p in module.named_parameters()}
    x.grad = None
    module.zero_grad()
    return found


def plainly(module: nn.Module, x: Tensor, at: dict[str, Tensor], around) -> dict[str, Tensor]:
    """Autograd's own, at some weights."""
    for name, parameter in module.named_parameters():
        parameter.data = at[name].clone(memory_format=torch.preserve_format)
    x = x.detach().clone().requires_grad_()
    with around():
        made = module(x)
    made.backward(torch.ones_like(made).cumsum(0))
    return gradients(module, x)


class Piece:
    """One stage by itself: micro-batches on stashed weights, as stage 0 of four runs them."""

    def __init__(self, module: nn.Module, around, halved: bool) -> None:
        self.module, self.around, self.halved = module, around, halved
        endless = LoweredLoop(penstock.loop("pipedream", stages=STAGES))
        self.weights = VersionedWeights(endless, {0: list(module.parameters())}, TiedWeights([], {0}, None))
        self.made: dict[int, tuple[Tensor, Tensor, WeightQueue]] = {}
        self.versions = [values(module)]

    def forward(self, number: int, x: Tensor) -> None:
        x, queue = x.detach().clone().requires_grad_(), WeightQueue()
        with self.weights.at(Op.F, 0, number, max(0, number - 3)), self._deferring(queue), self.around():
            self.made[number] = (x, self.module(x), queue)

    def backward(self, number: int) -> dict[str, Tensor]:
        """Where it is had in halves, the weights change between them."""
        x, made, queue = self.made.pop(number)
        version = max(0, number - 3)
        with self.weights.at(Op.I if self.halved else Op.B, 0, number, version), self._deferring(queue):
            made.backward(torch.ones_like(made).cumsum(0))
        if self.halved:
            self.update()
            with self.weights.at(Op.W, 0, number, version):
                queue.run()
        else:
            self.update()
        return gradients(self.module, x)

    def update(self) -> None:
        """Far enough to be seen."""
        with self.weights.updating(0), torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(-1.7).add_(0.3)
        self.versions.append(values(self.module))

    def _deferring(self, queue: WeightQueue):
        return deferring(queue) if self.halved else nullcontext()


def run(kind: str, around=nullcontext, halved: bool = False, dtype: torch.dtype | None = None) -> float:
    """Seven micro-batches: how far what their backwards gave lies from what it should, by its size."""
    module, x = ready(kind)
    if dtype is not None:
        module, x = module.to(dtype), x.detach().to(dtype)
    piece, found = Piece(module, around, halved), []
    for number in range(7):
        piece.forward(number, x * (number + 1))
        if number >= 3:
            found.append(piece.backward(number - 3))
    for number in range(4, 7):
        found.append(piece.backward(number))
    assert len({version[name].sum().item() for version in piece.versions for name in version}) > 7
    return max(
        far(got, plainly(module, x * (number + 1), piece.versions[max(0, number - 3)], around))
        for number, got in enumerate(found)
    )


def far(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    size = max(gradient.abs().max().item() for gradient in wanted.values())
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted) / size


@pytest.mark.parametrize("kind", OPERATORS)
def test_the_gradients_are_those_of_plain_autograd_at_the_forwards_weights(kind):
    assert run(kind) == 0


@pytest.mark.parametrize("kind", [kind for kind, operator in OPERATORS.items() if operator.splits])
def test_and_with_weight_gradients_after_another_update(kind):
    assert run(kind, halved=True) < 1e-13  # a weight that is used several times: added in another order


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("kind", ["Linear", "Conv2d", "attention block", "MultiheadAttention", "tied", "einsum"])
def test_and_under_bf16_autocast(kind, halved):
    assert run(kind, lambda: torch.autocast("cpu", torch.bfloat16), halved, torch.float32) <= (0.01 if halved else 0)


def halves(loop: Loop) -> Loop:
    """A loop with I and W instead of B, for m = 1; the W comes a pass later, so a stage's delay grows by one.

    stage 0 of 2   fill F0 F1 I0   body F2@0 I1@0 W0@0 | F3@1 I2@0 W1@0 | F4@2 I3@1 W2@0 | ...
    stage 1 of 2   fill F0 I0      body F1@0 I1@0 W0@0 | F2@1 I2@1 W1@0 | F3@2 I3@2 W2@1 | ...
    """
    fill, body = [], []
    for stage in range(loop.shape.stages):
        warm = loop.shape.stages - 1 - stage
        forwards = [(Op.F, stage, number, number - warm - 1) for number in range(warm + 2)]
        back = [(op, stage, number, number - warm - 1) for op, number in ((Op.I, 0), (Op.I, 1), (Op.W, 0))]
        fill.append(_rows([*forwards[:-1], back[0]]))
        body.append(_rows([forwards[-1], *back[1:]]))
    return replace(loop, fill=tuple(fill), body=tuple(body))


def _rows(actions: list[tuple[int, int, int, int]]) -> ScheduleRows:
    return ScheduleRows.compute(*zip(*actions, strict=True))


@pytest.mark.parametrize(("kind", "n"), [("chain", 4), ("tied chain", 3), ("conv", 3), ("gpt", 2)])
def test_a_loop_with_late_weight_gradients_is_the_recursion(kind, n):
    """As `halves` draws it: version max(0, k - warm - 1) on each stage."""
    loop = halves(penstock.loop("pipedream", stages=n))
    assert check(loop.unroll(12)).faults == ()
    made = {
        "chain": lambda: recursion_models.chain(n),
        "tied chain": lambda: recursion_models.chain(n, tied=(0, 2)),
        "conv": lambda: recursion_models.conv_net(n),
        "gpt": lambda: recursion_models.gpt(n, width=4),
    }[kind]()
    batches, reference = made.batches(14, rows=3), Recursion(made, Method("pipedream"), MOMENTUM)
    reference.law = replace(reference.law, named=lambda s, t: max(0, t - (n - 1 - s) - 1))
    pipe = penstock.Pipeline(
        made.module, example=batches[0][0], schedule=loop, microbatches=1, loss=made.loss, verify=False,
        cuts=[str(at) for at in range(1, n)], optimizer=optimizer(MOMENTUM),
    )  # fmt: skip
    assert trained(pipe, batches) == pytest.approx(reference.run(batches), abs=WITHIN)
    assert off(weights(pipe), reference.weights()) < WITHIN
