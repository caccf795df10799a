"""Batch norms and random numbers in stages with replicas.

A norm normalises each replica's part of a micro-batch by that part's own statistics, as a plain loop over the same
parts does. Its running averages move once a step, by the statistics of the whole batch, as without replicas.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plain
from penstock import SplitError
from replicated import METHODS, pipeline

torch.set_num_threads(1)
F64 = torch.float64
CUTS = {1: [], 2: ["9"], 3: ["6", "15"]}  # of the convolutional net's 27 layers


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def parts(value: Tensor, count: int) -> list[Tensor]:
    return [part for part in plain.parts_of(value, count) if len(part)]


class Reference:
    """A plain loop over the parts that replicas have of each micro-batch, stage by stage."""

    def __init__(self, given: plain.Case, replicas: list[int]) -> None:
        self.model, self.loss, self.replicas = given.fresh(), given.loss, replicas
        ends = [*map(int, CUTS[len(replicas)]), len(self.model)]
        self.stages = [self.model[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        self.optimizer = plain.adamw(self.model.parameters())
        self.seen: dict[nn.Module, list[Tensor]] = {}
        for norm in norms(self.model):
            norm.track_running_stats = False
            norm.register_forward_pre_hook(self.note)

    def note(self, norm: nn.Module, given: tuple[Tensor, ...]) -> None:
        self.seen.setdefault(norm, []).append(given[0].detach())

    def step(self, x: Tensor, y: Tensor, microbatches: int) -> float:
        total = 0.0
        for a, b in zip(parts(x, microbatches), parts(y, microbatches), strict=True):
            for stage, count in zip(self.stages, self.replicas, strict=True):
                a = torch.cat([stage(part) for part in parts(a, count)])
            loss = self.loss(a, b) * len(b) / len(y)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.move()
        return total

    def move(self) -> None:
        for norm, every in self.seen.items():
            whole = torch.cat(every)
            norm.num_batches_tracked += 1
            norm.running_mean.lerp_(whole.mean((0, 2, 3)), norm.momentum)
            norm.running_var.lerp_(whole.transpose(0, 1).flatten(1).var(1, correction=1), norm.momentum)
        self.seen.clear()


@pytest.mark.parametrize(
    ("replicas", "method"),
    [([2], "1f1b"), ([2], "zb-v"), ([2, 1], "zb-h1"), ([1, 3], "1f1b"), ([2, 2], "gpipe"), ([2, 1, 2], "dapple")],
)
def test_batch_norm_is_a_plain_loop_over_the_replicas_parts(replicas, method):
    given = plain.case("conv", rows=18)
    wanted = Reference(given, replicas)
    cuts = {"cuts": CUTS[len(replicas)]} if len(replicas) > 1 else {}
    pipe = pipeline(given, replicas, schedule=method, microbatches=3, **cuts, **METHODS[method])
    for x, y in given.batches:
        assert pipe.step(x, y).loss == pytest.approx(wanted.step(x, y, 3), rel=1e-10)
    found, known = pipe.model.state_dict(), wanted.model.state_dict()
    assert plain.off(found, known) < 1e-10


@pytest.mark.parametrize("replicas", [[2], [2, 1], [1, 3]], ids=str)
def test_running_averages_of_the_first_norm_are_those_of_the_whole_batch_at_once(replicas):
    """It is given the same in parts of any size."""
    given = plain.case("conv", rows=18)
    pipe, whole = pipeline(given, replicas, optimizer=None), given.fresh()
    for x, y in given.batches:
        with torch.no_grad():
            whole[:2](x)
        pipe.step(x, y)
    found, wanted = norms(pipe.model)[0], norms(whole)[0]
    assert torch.allclose(found.running_mean, wanted.running_mean, rtol=1e-12, atol=0)
    assert torch.allclose(found.running_var, wanted.running_var, rtol=1e-12, atol=0)


def test_a_step_that_fails_does_not_move_running_averages():
    given = plain.case("conv", rows=16)
    pipe = pipeline(given, [2, 1])
    pipe.step(*given.batches[0])
    before = {name: buffer.clone() for name, buffer in pipe.model.named_buffers()}
    broken = given.batches[1][0].clone()
    broken[-1] = float("nan")
    with pytest.raises(Exception, match="finite loss"):
        pipe.step(broken, given.batches[1][1])
    assert plain.off(dict(pipe.model.named_buffers()), before) == 0
    pipe.step(*given.batches[1])
    assert plain.off(dict(pipe.model.named_buffers()), before) > 0


class Noted(nn.Module):
    """Dropout that keeps what it let through."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.masks = nn.Dropout(0.5), []

    def forward(self, x: Tensor) -> Tensor:
        out = self.drop(torch.ones_like(x))
        if self.training and torch.is_grad_enabled() and not x.is_meta:
            self.masks.append(out.detach().clone())
        return x * out


def dropping() -> plain.Case:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), Noted(), nn.Tanh(), nn.Linear(6, 6), Noted(), nn.Linear(6, 6)]
    return plain.Case(nn.Sequential(*layers).to(F64), F.mse_loss, plain.case("mlp").batches)


@pytest.mark.parametrize("replicas", [[2], [2, 1], [2, 2]], ids=str)
def test_replicas_drop_other_numbers_and_the_same_again(replicas):
    found = []
    for options in ({}, {}, {"seed": 1}, {"schedule": "zb-h1"}, {"recompute": "always"}):
        pipe = pipeline(dropping(), replicas, verify=False, **options)
        pipe.model[1].masks.clear()
        losses = [step.loss for step in pipe.train(dropping().batches)]
        found.append((losses, pipe.model[1].masks))
    (losses, masks), again, other, split, twice = found
    assert losses == again[0] == twice[0]
    assert split[0] == pytest.approx(losses, rel=1e-12)
    assert losses != other[0]
    first = masks[: 4 * replicas[0]]  # of the first step: each replica's in turn, or in the order they ran
    assert {tuple(mask.shape) for mask in first} == {(8 // 4 // replicas[0], 6)}
    assert len({tuple(mask.flatten().tolist()) for mask in first}) == len(first)


class Times(nn.Module):
    """A layer that keeps what it is given to multiply with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(6, 6), []

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not noise.is_meta:
            self.given.append(tuple(noise.flatten().tolist()))
        return torch.tanh(self.layer(x)) * noise


class Open(nn.Module):
    """Random numbers that the model's own code draws, between its modules: for rows, or for all of them alike."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.layers, self.rows = nn.ModuleList(Times() for _ in range(4)), rows

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape[0] if self.rows else 1, 6, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, noise)
        return x


def drawn(rows: bool, replicas: list[int]) -> list[list[tuple[float, ...]]]:
    """The random numbers that each layer was given in one step of one micro-batch."""
    given = plain.Case(Open(rows).to(F64), F.mse_loss, plain.case("mlp").batches)
    pipe = pipeline(given, replicas, microbatches=1, verify=False)
    for layer in pipe.model.layers:
        layer.given.clear()
    pipe.step(*given.batches[0])
    return [layer.given for layer in pipe.model.layers]


def test_code_between_modules_draws_other_numbers_for_each_replica_and_the_same_on_all_its_stages():
    every = drawn(rows=True, replicas=[2, 2])
    assert len(set(every[0])) == 2
    assert all(set(layer) == set(every[0]) for layer in every)


def test_random_numbers_for_rows_drawn_between_modules_of_stages_with_unequal_replicas_are_refused():
    with pytest.raises(
        SplitError, match=r"random numbers for rows that a module .* 'torch.rand' at .*draw them inside"
    ):
        drawn(rows=True, replicas=[2, 1])
    every = drawn(rows=False, replicas=[2, 1])
    assert len({noise for layer in every for noise in layer}) == 1


class Dropping(nn.Module):
    """Layers that are left out by chance, and numbers that are dropped between layers."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.layers, self.rate = nn.ModuleList(nn.Linear(6, 6) for _ in range(6)), rate

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and not self.rate and torch.rand([]) < 0.3:
                continue
            x = x + F.dropout(torch.tanh(layer(x)), self.rate, self.training)
        return x


@pytest.mark.parametrize("replicas", [[2, 1], [1, 3]], ids=str)
def test_replicas_of_a_micro_batch_leave_out_the_same_layers_where_their_numbers_differ(replicas):
    """So they train as no replicas do, whose random numbers are the same."""
    torch.manual_seed(0)
    given = plain.Case(Dropping().to(F64), F.mse_loss, plain.case("mlp", rows=12).batches)
    found = [pipeline(given, counts, verify=False) for counts in (replicas, [1, 1])]
    losses = [[step.loss for step in pipe.train(given.batches)] for pipe in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert plain.off(*(plain.weights(pipe.model) for pipe in found)) < 1e-10


def test_numbers_that_code_between_modules_drops_do_not_hide_the_rows():
    torch.manual_seed(0)
    given = plain.Case(Dropping(0.1).to(F64), F.mse_loss, plain.case("mlp", rows=12).batches)
    for replicas in ([2, 1], [1, 3]):
        assert all(step.updated for step in pipeline(given, replicas).train(given.batches))
