"""Random numbers that a model draws between its blocks: every stage draws the same, each micro-batch others."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Pipeline

WIDTH, DEPTH, PARTS = 6, 4, 2

DRAWS = {
    "torch": lambda: torch.rand([]),
    "gumbel": lambda: F.gumbel_softmax(torch.zeros(3), dim=-1)[0],
    "random": random.random,
    "numpy": lambda: float(np.random.normal()),
    "random and torch": lambda: random.random() * torch.rand([]),
}


class Scaled(nn.Module):
    """Multiplies between all blocks by a number that is drawn once, and returns it."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.draw, self.given = draw, None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        drawn = self.draw() if self.given is None else self.given
        for block in self.blocks:
            x = torch.tanh(block(x)) * drawn
        return x, torch.as_tensor(drawn, dtype=x.dtype)


class Loss:
    """Notes what was drawn for each micro-batch, by the sum of its target."""

    def __init__(self) -> None:
        self.drawn: dict[float, float] = {}

    def __call__(self, out: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        self.drawn[float(target.sum())] = float(out[1])
        return F.mse_loss(out[0], target)


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(4, WIDTH).double(), torch.randn(4, WIDTH).double()) for _ in range(count)]


def model_of(draw) -> Scaled:
    torch.manual_seed(1)
    return Scaled(draw).double()


def trained(model: nn.Module, loss: Loss, data: list[tuple[Tensor, Tensor]], **options) -> list[float]:
    options = {"stages": 3, "microbatches": PARTS, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), **options}
    pipe = Pipeline(model, example=data[0][0], loss=loss, **options)
    return [pipe.step(x, y).loss for x, y in data]


def by_hand(model: Scaled, drawn: dict[float, float], data: list[tuple[Tensor, Tensor]]) -> nn.Module:
    """Plain training with the numbers that the pipeline drew."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in data:
        optimizer.zero_grad()
        for some, target in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
            model.given = drawn[float(target.sum())]
            (F.mse_loss(model(some)[0], target) / PARTS).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", DRAWS)
def test_all_stages_draw_the_same_and_every_micro_batch_another(name, recompute):
    model, loss, data = model_of(DRAWS[name]), Loss(), batches()
    reference = copy.deepcopy(model)
    trained(model, loss, data, recompute=recompute)
    parts = [float(part.sum()) for _, y in data for part in y.chunk(PARTS)]
    assert len({loss.drawn[part] for part in parts}) == PARTS * len(data)
    wanted = by_hand(reference, loss.drawn, data).state_dict()
    for key, found in model.state_dict().items():
        torch.testing.assert_close(found, wanted[key], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_depends_on_the_seed_and_not_on_stages_or_schedule(name):
    data = batches()

    def found(**options):
        return trained(model_of(DRAWS[name]), Loss(), data, **options)

    first = found(seed=3)
    for other in ({"stages": 2}, {"stages": 2, "schedule": "gpipe"}, {"schedule": "zb-h1"}):
        assert found(seed=3, **other) == pytest.approx(first, rel=1e-13)
    assert found(seed=4)[0] != first[0]


def test_draws_between_blocks_do_not_disturb_those_inside():
    """A block that draws itself goes on with its stage's numbers, wherever the model draws beside it."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.met = nn.Linear(WIDTH, WIDTH), []

        def forward(self, x: Tensor) -> Tensor:
            self.met.append(random.random())
            return self.layer(x)

    def met(outside):
        torch.manual_seed(1)
        model = model_of(outside)
        model.blocks = nn.ModuleList(Noisy() for _ in range(DEPTH)).double()
        trained(model, Loss(), batches(1), verify=False)
        return [block.met[-PARTS:] for block in model.blocks]

    assert met(random.random) == met(lambda: 0.5)


def test_the_users_generators_are_as_they_were():
    state, numpy_state = random.getstate(), np.random.get_state()[1].tolist()
    trained(model_of(lambda: random.random() + np.random.rand()), Loss(), batches())
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == numpy_state


class Dropping(nn.Module):
    """Leaves blocks out by chance, as speech models do."""

    def __init__(self, depth: int, chance: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand([]) >= self.chance:
                x = x + torch.tanh(block(x))
        return x


def test_the_example_is_cut_where_most_layers_are_met_and_patterns_are_remembered():
    torch.manual_seed(1)
    model = Dropping(8, 0.1).double()
    data = batches(1)
    pipe = Pipeline(model, example=data[0][0], stages=4, microbatches=PARTS, loss=F.mse_loss)
    assert all(pipe.split.homes[f"blocks.{at}"] in range(4) for at in range(8))
    assert len({pipe.split.homes[f"blocks.{at}"] for at in range(8)}) == 4
    for _ in range(30):
        pipe.step(*data[0])
    trained = max(pipe.split.paths.values(), key=len)
    assert len(trained) == len({tuple(event.name for event in path.trace.events) for path in trained}) > 5
