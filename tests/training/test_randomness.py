"""Dropout depends on (seed, step, stage, micro-batch) and on nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plain
from penstock import Pipeline

torch.set_num_threads(1)
F64 = torch.float64


def dropping() -> plain.Case:
    torch.manual_seed(4)
    layers = [part for _ in range(8) for part in (nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.4))]
    return plain.Case(nn.Sequential(*layers).to(F64), F.mse_loss, plain.case("mlp").batches)


def run(given: plain.Case, **options):
    options = {"stages": 4, "microbatches": 8, "loss": given.loss, "optimizer": plain.adamw} | options
    pipe = Pipeline(given.fresh(), example=given.example, **options)
    return [step.loss for step in pipe.train(given.batches)], plain.weights(pipe.model)


@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
@pytest.mark.parametrize("method", ["naive", "gpipe", "1f1b", "dapple", "zb-h1", "zb-h2"])
def test_same_results_for_every_schedule_with_and_without_recompute(method, recompute):
    given = dropping()
    losses, weights = run(given, schedule="1f1b")
    found, after = run(given, schedule=method, recompute=recompute)
    assert found == pytest.approx(losses, rel=1e-12)
    assert plain.off(after, weights) < 1e-11


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_chunked_schedules_agree_with_each_other(recompute):
    given = dropping()
    wanted = run(given, stages=2, chunks=2, schedule="interleaved")[0]
    for method in ("zb-v", "dualpipe-v"):
        assert run(given, stages=2, schedule=method, recompute=recompute)[0] == pytest.approx(
            wanted, rel=plain.BITS, abs=0
        )


def test_the_seed_decides():
    given = dropping()
    assert run(given, seed=1)[0] == pytest.approx(run(given, seed=1)[0], rel=1e-12)
    assert run(given, seed=1)[0] != pytest.approx(run(given, seed=2)[0])
    assert run(given, seed=-1)[0] == pytest.approx(run(given, seed=-1)[0], rel=1e-12)


SEEN: dict[nn.Module, list[torch.Tensor]] = {}  # not on the module: what a second run leaves there is put back


class Watched(nn.Module):
    @property
    def masks(self) -> list[torch.Tensor]:
        return SEEN.setdefault(self, [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.masks.append(F.dropout(torch.ones_like(x), 0.5, self.training))
        return x * self.masks[-1]


def test_masks_differ_between_steps_stages_and_micro_batches_and_repeat_when_recomputed():
    model = nn.Sequential(nn.Linear(6, 6), Watched(), nn.Linear(6, 6), Watched()).to(F64)
    x = torch.randn(32, 6, dtype=F64)
    loss = lambda out, _: out.mean()  # noqa: E731
    pipe = Pipeline(
        model, example=x[:8], cuts=["2"], microbatches=4, loss=loss, recompute="always", verify=False
    )  # without the runs that only look at the loss
    for layer in (model[1], model[3]):
        layer.masks.clear()
    pipe.step(x)
    pipe.step(x)
    masks = [mask for layer in (model[1], model[3]) for mask in layer.masks]
    assert len(masks) == 2 * 2 * 2 * 4  # layers, steps, runs, micro-batches
    distinct = {tuple(mask.flatten().tolist()) for mask in masks}
    assert len(distinct) == 2 * 2 * 4


class Skipping(nn.Module):
    """Drops itself by Python's or NumPy's generator, inside one block."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.draw, self.layer = draw, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.draw() < 0.5 else x + torch.tanh(self.layer(x))


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: np.random.random()])
def test_layer_drop_is_the_same_when_recomputed_and_for_every_schedule(draw):
    torch.manual_seed(4)
    # One layer that is always there, and cuts that do not depend on which others the trace has met.
    model = nn.Sequential(*(Skipping(draw) for _ in range(8)), nn.Linear(6, 6)).to(F64)
    given, cuts = plain.Case(model, F.mse_loss, plain.case("mlp").batches), ["2", "4", "6"]
    losses, weights = run(given, cuts=cuts)
    for options in ({"recompute": "always"}, {"schedule": "gpipe"}, {"schedule": "zb-h1", "recompute": "always"}):
        found, after = run(given, cuts=cuts, **options)
        assert found == pytest.approx(losses, rel=1e-12)
        assert plain.off(after, weights) < 1e-11


class Drawing:
    """Draws by Python's generator, or what it is told to."""

    always: float | None = None

    def __call__(self) -> float:
        drawn = random.random()
        return drawn if self.always is None else self.always


@pytest.mark.parametrize("cuts", [["2", "4", "6"], ["8"], None])
def test_what_the_trace_has_left_out_is_trained_all_the_same(cuts):
    """A layer that was left out on the trace had handed on what it was given, and later stages took that from whoever
    had made it: the input, say. What the layer made in a step was then lost."""
    found = []
    for traced in (0.0, 1.0):  # all are left out, or none
        torch.manual_seed(4)
        draw = Drawing()
        model = nn.Sequential(*(Skipping(draw) for _ in range(8)), nn.Linear(6, 6)).to(F64)
        given, draw.always = plain.case("mlp"), traced
        where = {"cuts": cuts} if cuts else {"stages": 1}
        pipe = Pipeline(
            model, example=given.example, microbatches=8, loss=F.mse_loss, optimizer=plain.adamw, verify=False, **where
        )
        draw.always = 1.0  # none is left out in the steps
        losses = [step.loss for step in pipe.train(given.batches)]
        found.append((losses, plain.weights(pipe.model)))
    assert found[0][0] == found[1][0]
    assert plain.off(found[0][1], found[1][1]) == 0


def test_the_users_generators_are_left_alone():
    given = dropping()
    pipe = Pipeline(given.fresh(), example=given.example, stages=2, microbatches=4, loss=given.loss)

    def states():
        return torch.random.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = states()
    pipe.step(*given.batches[0])
    pipe.forward(given.batches[0][0])
    pipe.evaluate(given.batches)
    assert states() == before
