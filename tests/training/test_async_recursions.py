"""The engine against the published recursions, which share no code with it: all losses, all weights of every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import recursion_models
import recursions
from recursion_models import Model
from recursions import Carried, Place
from segments import ADAMW, MOMENTUM, SGD, WITHIN, Method, Recursion, Rule, off, pipeline, trained, weights

torch.set_num_threads(1)
UPDATES = 40

MODELS: dict[str, Callable[[int], Model]] = {
    "chain": lambda n: recursion_models.chain(n, width=3),
    "tied chain": lambda n: recursion_models.chain(n, width=3, tied=(0, n - 2)),  # not the last stage: in the middle
    "conv": lambda n: recursion_models.conv_net(n, channels=2, side=3),
    "gpt": lambda n: recursion_models.gpt(n, width=4, length=3),
}
STASH, VERTICAL, NO_STASH = {}, {"vertical_sync": True}, {"stash": False}
NEITHER, T1, T2, BOTH = {"t2": False}, {"t1": 25, "t2": False}, {}, {"t1": 25, "t2": 0.3}


def agree(
    kind: str, n: int, method: Method, rule: Rule, clip: float | None = None, updates: int = UPDATES, **more: Any
) -> None:
    model = MODELS[kind](n)
    batches = model.batches(updates, rows=method.m + 1)
    reference = Recursion(model, method, rule, clip)
    pipe = pipeline(model, method, rule, clip=clip, **more)
    compare(pipe, reference, batches)


def compare(pipe: Any, reference: Recursion, batches: list) -> None:
    losses = reference.run(batches)
    assert trained(pipe, batches) == pytest.approx(losses, abs=WITHIN)
    assert off(weights(pipe), reference.weights()) < WITHIN
    assert len({round(loss, 6) for loss in losses}) == len(batches)  # it moves


@pytest.mark.parametrize(
    ("kind", "n", "m", "options", "rule"),
    [
        ("chain", 2, 1, STASH, SGD),
        ("chain", 8, 1, STASH, ADAMW),
        ("conv", 5, 1, STASH, MOMENTUM),
        ("gpt", 3, 1, STASH, ADAMW),
        ("tied chain", 7, 1, STASH, MOMENTUM),
        ("chain", 3, 3, STASH, SGD),
        ("chain", 8, 1, VERTICAL, SGD),
        ("conv", 4, 1, VERTICAL, ADAMW),
        ("tied chain", 5, 2, VERTICAL, SGD),
        ("chain", 8, 1, NO_STASH, MOMENTUM),
        ("conv", 3, 1, NO_STASH, ADAMW),
        ("tied chain", 6, 1, NO_STASH, ADAMW),
    ],
)
def test_pipedream(kind, n, m, options, rule):
    agree(kind, n, Method("pipedream", m, options), rule)


@pytest.mark.parametrize(
    ("kind", "n", "m", "rule"),
    [
        ("chain", 4, 4, SGD),
        ("chain", 4, 8, MOMENTUM),
        ("chain", 3, 5, ADAMW),
        ("conv", 3, 3, ADAMW),
        ("tied chain", 3, 4, MOMENTUM),
        ("gpt", 2, 2, MOMENTUM),
    ],
)
def test_2bw(kind, n, m, rule):
    agree(kind, n, Method("2bw", m), rule)


@pytest.mark.parametrize(
    ("kind", "n", "m", "options", "rule"),
    [
        ("chain", 5, 1, NEITHER, ADAMW),
        ("chain", 8, 1, T1, MOMENTUM),
        ("conv", 3, 2, T1, SGD),
        ("chain", 8, 1, T2, SGD),
        ("conv", 4, 1, T2, MOMENTUM),
        ("gpt", 3, 1, T2, ADAMW),
        ("tied chain", 5, 2, T2, MOMENTUM),
        ("chain", 7, 2, BOTH, MOMENTUM),
        ("conv", 3, 1, BOTH, ADAMW),
        ("tied chain", 6, 1, BOTH, SGD),
    ],
)
def test_pipemare(kind, n, m, options, rule):
    agree(kind, n, Method("pipemare", m, options), rule)


@pytest.mark.parametrize(
    ("kind", "method", "rule", "clip"),
    [
        ("chain", Method("pipedream", 3, STASH), SGD, None),
        ("tied chain", Method("pipedream", 4, VERTICAL), MOMENTUM, None),
        ("conv", Method("pipedream", 3, NO_STASH), SGD, 0.3),
        ("tied chain", Method("2bw", 4), ADAMW, 0.3),
        ("gpt", Method("pipemare", 4, BOTH), MOMENTUM, None),
    ],
    ids=str,
)
def test_mini_batches_of_fewer_rows_than_micro_batches(kind, method, rule, clip):
    """In the middle of the stream, one after the other, and at its end."""
    model, pipe_rows = MODELS[kind](3), [6, 2, 1, 6, 6, 3, 6, 6, 6, 1]
    every = model.batches(len(pipe_rows), rows=6)
    batches = [(x[:rows], y[:rows]) for (x, y), rows in zip(every, pipe_rows, strict=True)]
    compare(pipeline(model, method, rule, clip=clip), Recursion(model, method, rule, clip), batches)


METHODS = [
    Method("pipedream"),
    Method("pipedream", 2, VERTICAL),
    Method("pipedream", 1, NO_STASH),
    Method("2bw", 3),
    Method("pipemare", 1, BOTH),
]


@pytest.mark.parametrize(
    ("kind", "method"), [*zip(["gpt", "tied chain", "chain", "gpt", "conv"], METHODS, strict=True)]
)
def test_clipping_is_by_stage_and_for_2bw_over_all(kind, method):
    """A shared weight's gradient counts on the stage that owns it. The norm is passed about half of the time."""
    agree(kind, 3, method, SGD, clip=0.3, updates=12)


def predicting(method: Method, how: str) -> Method:
    return Method(method.schedule, method.m, {**method.options, "predict": how})


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(("kind", "rule"), [("tied chain", ADAMW)])
def test_xpipe_goes_ahead_by_the_last_step(kind, rule, method):
    agree(kind, 3, predicting(method, "xpipe"), rule, updates=12)


def test_xpipe_with_a_head_that_shares_the_first_stages_table():
    for method in (METHODS[0], METHODS[4]):
        agree("gpt", 2, predicting(method, "xpipe"), SGD, updates=10)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(("kind", "rule"), [("tied chain", ADAMW), ("chain", MOMENTUM)])
def test_spectrain_goes_ahead_by_the_momentum(kind, rule, method):
    """w - s * lr * buf, or w - s * lr * mhat / (sqrt(vhat) + eps), for the s updates that a forward's version lacks."""
    agree(kind, 4 if method.schedule != "2bw" else 3, predicting(method, "spectrain"), rule, updates=12)


@pytest.mark.parametrize(
    ("kind", "method", "recompute"),
    [
        ("gpt", Method("pipedream", 2), "always"),
        ("conv", Method("pipedream", 2, VERTICAL), "except-last"),
        ("tied chain", Method("2bw", 3), "always"),
    ],
)
def test_where_versions_are_kept_recompute_changes_nothing(kind, method, recompute):
    agree(kind, 3, method, SGD, updates=10, recompute=recompute)


class Recomputing(Recursion):
    """PipeMare with the library's recompute: the stage's forward runs again when its backward does, on the corrected
    weights u, from the input that the stage was sent. So its gradient is that of the stage at u, at that input."""

    def _mini_batch(self, b: int, batch: tuple[Any, Any]) -> tuple[float, dict[Place, Tensor]]:
        m, (x, y), loss = self.job.m, batch, 0.0
        gradients = {place: torch.zeros_like(history[0]) for place, history in self.history.items()}
        for part in range(m):
            mine = slice(len(x) * part // m, len(x) * (part + 1) // m)
            loss += self._micro_batch(b * m + part, x[mine], y[mine], len(x[mine]) / len(x), gradients)
        return loss, gradients

    def _micro_batch(self, t: int, x: Tensor, y: Tensor, share: float, gradients: dict[Place, Tensor]) -> float:
        carried: Carried = (x,)
        sent = []
        for s in range(len(self.job.stages)):
            sent.append(carried)
            carried = self._stage(s, carried, {place: self.forward(place, t) for place in self._places(s)})
        out = carried[0].detach().requires_grad_()
        loss = self.job.loss(out, y) * share
        dy: Carried = torch.autograd.grad(loss, out)
        for s in reversed(range(len(self.job.stages))):
            u = {place: self.backward(place, t).requires_grad_() for place in self._places(s)}
            inputs = tuple(p.detach().requires_grad_(p.is_floating_point()) for p in sent[s])
            wanted = [p for p in inputs if p.requires_grad]
            found = iter(torch.autograd.grad(self._stage(s, inputs, u), [*wanted, *u.values()], dy))
            dy = tuple(next(found) if p.requires_grad else None for p in inputs)
            for place, gradient in zip(u, found, strict=True):
                gradients[self.owner[place]] += gradient
        return loss.item()

    def _stage(self, s: int, carried: Carried, at: dict[Place, Tensor]) -> Carried:
        for o, op in enumerate(self.job.stages[s]):
            carried = op.run(carried, {name: at[s, o, name] for name in op.weights})
        return carried

    def _places(self, s: int) -> list[Place]:
        return [(s, o, name) for o, op in enumerate(self.job.stages[s]) for name in op.weights]


@pytest.mark.parametrize(
    ("kind", "m", "options"),
    [("chain", 1, T2), ("chain", 1, NEITHER), ("conv", 2, T2), ("tied chain", 1, {"predict": "xpipe"})],
)
def test_pipemare_with_recompute_is_the_gradient_at_the_corrected_weights(kind, m, options):
    model, method = MODELS[kind](4), Method("pipemare", m, options)
    batches = model.batches(14, rows=m + 1)
    pipe, usual = pipeline(model, method, SGD, recompute="always"), Recursion(model, method, SGD)
    compare(pipe, Recomputing(model, method, SGD), batches)
    usual.run(batches)
    assert off(weights(pipe), usual.weights()) > 1e-6  # it is told apart from that without recompute


def test_the_recursions_here_are_those_of_the_published_formulas():
    """Without a drain in between they must give what `recursions`, which were checked by themselves, give."""
    model = MODELS["tied chain"](4)
    batches = model.batches(10, rows=4)
    for method, published in (
        (Method("pipedream", 2), recursions.stashing),
        (Method("pipedream", 2, VERTICAL), recursions.vertical_sync),
        (Method("pipedream", 2, NO_STASH), recursions.no_stash),
        (Method("2bw", 4), recursions.two_bw),
        (Method("pipemare", 2, {"t1": 5}), lambda job: recursions.pipemare(job, t1=5)),
        (Method("pipedream", 1, {"predict": "xpipe"}), recursions.stashing),
    ):
        job = recursions.Job(
            model.stages, batches, model.loss, ADAMW, method.m, 0.5, predict=method.options.get("predict")
        )
        wanted, found = published(job), Recursion(model, method, ADAMW, clip=0.5)
        assert found.run(batches) == wanted.losses
        assert off(found.weights(), model.named(wanted.weights)) == 0
