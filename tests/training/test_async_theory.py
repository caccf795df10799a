"""Where training turns unstable on f(w) = lam w**2 / 2: the engine itself, at the learning rates that theory prints.

Only the first of tau + 1 stages has a weight; the others hand its product on, so the weight's delay is tau. Each number
of the weight is a run of its own: they share the learning rate 1 and differ in lam, so that one training looks at rates
from 0.8 to 1.2 times the threshold.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
import quadratic
from quadratic import Delays

torch.set_num_threads(1)
SHARES = [0.8 + 0.025 * step for step in range(17)]  # of the threshold


class Twice(nn.Module):
    """x w and x w w, by two products: the backward of the second asks for w again."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(count, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        once = x * self.w
        return torch.cat([once, once * self.w], 1)


def losses(rates: Tensor, sense: float):
    """Gradient (1 + sense) w_forward - sense w_backward times a rate: of c/2 y**2 - sense y2, c = 1 + 2 sense."""

    def loss(made: Tensor, target: Tensor) -> Tensor:
        once, twice = made.chunk(2, 1)
        return (rates * ((1 + 2 * sense) / 2 * once.square() - sense * twice)).sum()

    return loss


def paths(law: Delays, edge: float, steps: int, schedule: str, m: int = 1, **options: Any) -> Tensor:
    """The weights after each update, a column for each share of the threshold."""
    rates = torch.tensor([share * edge for share in SHARES], dtype=torch.float64)
    model = nn.Sequential(Twice(len(rates)), *(nn.Identity() for _ in range(m - 1 if schedule == "2bw" else law.tf)))
    batch, found = (torch.ones(m, len(rates), dtype=torch.float64), torch.zeros(m)), []

    def watched(params: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(params, lr=1.0)
        optimizer.register_step_post_hook(lambda *_: found.append(model[0].w.detach().clone()))
        return optimizer

    pipe = penstock.Pipeline(
        model, example=batch[0], stages=len(model), cuts=[str(at) for at in range(1, len(model))], schedule=schedule,
        microbatches=m, loss=losses(rates, law.sense), optimizer=watched, verify=False, **options,
    )  # fmt: skip
    assert sum(1 for _ in pipe.train([batch] * steps)) == steps
    return torch.stack(found)


def first_growing(found: Tensor) -> float:
    """The least share of the threshold whose second half reaches farther out than its first."""
    half = len(found) // 2
    grows = found[half:].abs().amax(0) > found[:half].abs().amax(0)
    assert grows.tolist() == sorted(grows.tolist())  # once unstable, always
    return SHARES[grows.tolist().index(True)]


def turns(law: Delays, edge: float, steps: int, schedule: str, **options: Any) -> None:
    found = paths(law, edge, steps, schedule, **options)
    assert 0.95 < first_growing(found) < 1.05
    for share, path in zip(SHARES, found.T.tolist(), strict=True):
        assert path == pytest.approx(quadratic.path(law, share * edge, steps), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("tau", "edge"), [(0, 2), (1, 1), (2, 0.618034), (3, 0.445042), (5, 0.284630)])
def test_delayed_sgd(tau, edge):
    """(2 / lam) sin(pi / (4 tau + 2)), whether weights are stashed or not: with one product, backward needs none."""
    turns(Delays(tau), edge, 80, "pipedream")


@pytest.mark.parametrize("options", [{"vertical_sync": True}, {"stash": False}])
def test_and_the_other_kinds_of_pipedream(options):
    turns(Delays(3), 0.445042, 80, "pipedream", **options)


@pytest.mark.parametrize("depth", [2, 3])
def test_2bw_has_a_delay_of_one_whatever_its_depth(depth):
    turns(Delays(1), 1.0, 80, "2bw", m=depth)


D_STAR = quadratic.best_g(10) ** 10  # so that D ** (1 / tau) is the paper's g*


@pytest.mark.parametrize(
    ("law", "edge", "t2"),
    [
        (Delays(10, 0, 5), 0.01756, False),
        (Delays(10, 0, 5, quadratic.best_g(10)), 0.09762, D_STAR),
        (Delays(10, 0, 5, quadratic.default_g(10)), 0.09711, True),
    ],
)
def test_pipemare_where_the_gradient_minds_the_gap(law, edge, t2):
    """T2 raises the threshold as printed: from 0.01756 to 0.09762 at g*, 0.09711 at the default."""
    turns(law, edge, 90, "pipemare", t2=t2)


def test_without_stashing_the_gap_is_felt_and_with_it_not():
    """The same function at the same rates: stashing takes the forward's weights twice, so its threshold has no gap."""
    turns(Delays(5, 0, 5), quadratic.first_unstable(Delays(5, 0, 5)), 80, "pipedream", stash=False)
    assert first_growing(paths(Delays(5, 0, 5), 0.284630, 80, "pipedream")) == pytest.approx(1, abs=0.05)


def test_t2_can_hurt():
    """For a negative sensitivity, here -1/2 at delay 16, the threshold falls from 2.0 to 0.104."""
    turns(Delays(16, 0, -0.5, quadratic.best_g(16)), 0.104, 90, "pipemare", t2=quadratic.best_g(16) ** 16)
