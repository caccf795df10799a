"""What training without a flush keeps beside weights: running averages, random numbers, rates, the scale of fp16."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import penstock

torch.set_num_threads(1)
METHODS: list[tuple[str, int, dict[str, Any]]] = [
    ("pipedream", 1, {}),
    ("pipedream", 2, {"vertical_sync": True}),
    ("2bw", 3, {}),
    ("pipemare", 2, {}),
]


def made(model: nn.Module, schedule: str, m: int, x: Tensor, **more: Any) -> penstock.Pipeline:
    n = len(model)
    given = {"loss": F.mse_loss, "optimizer": lambda params: torch.optim.SGD(params, lr=0.05), "verify": False} | more
    return penstock.Pipeline(
        model, example=x, stages=n, cuts=[str(at) for at in range(1, n)], schedule=schedule, microbatches=m, **given
    )


def noted(seen: dict[float, Tensor], x: Tensor) -> None:
    """In order; a second time, by a recompute, is no news."""
    seen.setdefault(x.sum().item(), x.detach())


@pytest.mark.parametrize(
    ("momentum", "recompute", "schedule", "m", "options"),
    [
        *((0.3, "never", *method) for method in METHODS),
        *((None, "never", *method) for method in METHODS[::2]),
        *((0.3, "always", *method) for method in METHODS[:3]),
    ],
)
def test_running_averages_move_once_a_mini_batch_by_its_own_statistics(momentum, recompute, schedule, m, options):
    """In order; what a norm was given is written down by a hook, whatever weights it came from."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Tanh()) for _ in range(3))
    ).double()
    batches = [(torch.randn(12, 4).double(), torch.randn(12, 4).double()) for _ in range(7)]
    pipe = made(model, schedule, m, batches[0][0], recompute=recompute, **options)
    seen: list[dict[float, Tensor]] = [{}, {}, {}]
    norms = [stage[1] for stage in model]
    starts = [(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]
    for norm, mine in zip(norms, seen, strict=True):
        norm.register_forward_pre_hook(lambda _, x, mine=mine: noted(mine, x[0]))
    assert len(list(pipe.train(batches))) == 7
    for norm, mine, (mean, variance) in zip(norms, seen, starts, strict=True):
        given = list(mine.values())
        assert len(given) == 7 * m
        for number in range(7):
            whole = torch.cat(given[number * m : (number + 1) * m])
            share = momentum if momentum is not None else 1 / (number + 1)
            mean = (1 - share) * mean + share * whole.mean(0)
            variance = (1 - share) * variance + share * whole.var(0)
        assert norm.num_batches_tracked == 7
        assert torch.allclose(norm.running_mean, mean, atol=1e-12)
        assert torch.allclose(norm.running_var, variance, atol=1e-12)


def test_running_averages_of_a_run_that_fails_are_those_of_the_mini_batches_that_came_through():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)))
    batches = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(6)]
    pipe, came = made(model, "pipedream", 1, batches[0][0]), []
    batches[4] = (batches[4][0], batches[4][1] * torch.nan)
    with pytest.raises(penstock.InputError, match="a finite loss"):
        came.extend(pipe.train(batches))
    assert {int(stage[1].num_batches_tracked) for stage in model} == {len(came)}
    assert all(stage[1].track_running_stats for stage in model)


class Spied(nn.Module):
    """A dropout whose masks are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape) < 0.5
        self.masks.append(mask)
        return x * mask


def masks(schedule: str, m: int, seed: int = 0, **options: Any) -> list[Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), Spied()) for _ in range(3)))
    batches = [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(5)]
    pipe = made(model, schedule, m, batches[0][0], seed=seed, **options)
    for stage in model:
        stage[1].masks.clear()
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    list(pipe.train(batches))
    assert torch.random.get_rng_state().equal(before)  # the user's own numbers are not touched
    return [mask for stage in model for mask in stage[1].masks]


def test_random_numbers_depend_on_seed_step_stage_and_micro_batch_alone():
    """So all schedules draw the same ones, and no two places share theirs."""
    plain = masks("1f1b", 3)
    for schedule, options in (("pipedream", {}), ("2bw", {}), ("pipemare", {"t1": 3}), ("gpipe", {})):
        assert all(map(torch.equal, masks(schedule, 3, **options), plain))
    assert len({tuple(mask.flatten().tolist()) for mask in plain}) == len(plain) == 3 * 15
    assert not any(map(torch.equal, plain, masks("pipedream", 3, seed=1)))


@pytest.mark.parametrize(("schedule", "m", "options"), METHODS)
def test_schedulers_step_once_an_update_on_each_stage(schedule, m, options):
    """Every update runs at its own rate; T1's factor is none of the scheduler's business."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    batches = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(6)]
    rates: dict[int, list[float]] = {}

    def watched(params: Any) -> torch.optim.Optimizer:
        optimizer, mine = torch.optim.SGD(params, lr=1.0), rates.setdefault(len(rates), [])
        optimizer.register_step_pre_hook(lambda made, *_: mine.append(made.param_groups[0]["lr"]))
        return optimizer

    more = {**options, "t1": 4} if schedule == "pipemare" else options
    pipe = made(
        model, schedule, m, batches[0][0], optimizer=watched, loss=lambda out, target: F.mse_loss(out, target) * 1e-3,
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda k: 1 / (k + 1)), **more,
    )  # fmt: skip
    for begin, end in pairwise((0, 2, 6)):
        list(pipe.train(batches[begin:end]))
    wanted = [1 / (k + 1) for k in range(6)]
    tau = [max((2 - stage) / m, 1) for stage in range(3)]
    for stage in range(3):
        eased = [tau[stage] ** -(1 - min(k / 4, 1)) if schedule == "pipemare" else 1 for k in range(6)]
        assert rates[stage] == pytest.approx([rate * factor for rate, factor in zip(wanted, eased, strict=True)])
    assert all(scheduler.get_last_lr() == [pytest.approx(1 / 7)] for scheduler in pipe.optimizers.schedulers)


class _Burst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * ctx.factor, None


class Burst(nn.Module):
    """Hands gradients on, but for some calls, in which they overflow."""

    def __init__(self, calls: set[int]) -> None:
        super().__init__()
        self.linear, self.calls, self.count = nn.Linear(4, 4), calls, -1

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return _Burst.apply(self.linear(x), torch.inf if self.count in self.calls else 1.0)


def updates(schedule: str, m: int, n: int, burst: set[int], count: int = 10, single: bool = False, **options: Any):
    """The updates that each stage made, by mini-batch, and the scale in the end. Stage 0 overflows in some calls."""
    torch.manual_seed(0)
    layer = Burst(set())
    model = nn.Sequential(layer, *(nn.Linear(4, 4) for _ in range(n - 1)))
    batches = [(torch.randn(m, 4), torch.randn(m, 4)) for _ in range(count)]
    steps: dict[int, int] = {}

    def watched(params: Any) -> torch.optim.Optimizer:
        optimizer, at = torch.optim.SGD(params, lr=1e-3), len(steps)
        steps[at] = 0
        optimizer.register_step_post_hook(lambda *_: steps.update({at: steps[at] + 1}))
        return optimizer

    more = {"loss": lambda out, target: F.mse_loss(out, target) * 0.01} | options  # nothing else overflows
    pipe = made(model, schedule, m, batches[0][0], precision="fp16", optimizer=watched, **more)
    layer.calls, layer.count = burst, -1
    records = [pipe.step(*batch) for batch in batches] if single else list(pipe.train(batches))
    assert all(p.isfinite().all() for p in model.parameters())
    return [steps[at] for at in range(n)], pipe.optimizers.scale, records


@pytest.mark.parametrize(("n", "m"), [(2, 1), (2, 2), (3, 1), (3, 2), (3, 3)])
@pytest.mark.parametrize("schedule", ["pipedream", "pipemare"])
def test_an_overflow_skips_its_stages_update_alone_and_halves_the_scale_once(schedule, n, m):
    """Stages learn of it by the next forward, wherever in its mini-batch the pipe then is."""
    steps, scale, _ = updates(schedule, m, n, {4 * m})
    assert steps == [9] + [10] * (n - 1)
    assert scale == 2.0**15


def test_overflows_that_were_under_way_when_the_scale_came_down_count_once():
    """Mini-batches 4 and 5 went out under the first scale; 9 went out under the second."""
    assert updates("pipedream", 1, 3, {4, 5})[:2] == ([8, 10, 10], 2.0**15)
    assert updates("pipedream", 1, 3, {2, 9}, count=14)[:2] == ([12, 14, 14], 2.0**14)


def test_an_overflow_at_the_very_end_is_not_forgotten():
    assert updates("pipedream", 1, 3, {9})[:2] == ([9, 10, 10], 2.0**15)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_under_2bw_all_stages_skip_it(clip):
    steps, scale, _ = updates("2bw", 3, 3, {12}, clip=clip)
    assert steps == [9, 9, 9]
    assert scale == 2.0**15
    assert updates("2bw", 3, 3, {27}, clip=clip)[:2] == ([9, 9, 9], 2.0**15)  # the last one, settled by the drain


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_a_single_step_is_skipped_by_all(schedule):
    steps, scale, records = updates(schedule, 2, 2, {4}, count=4, single=True)
    assert steps == [3, 3]
    assert scale == 2.0**15
    assert [record.updated for record in records] == [True, True, False, True]


def test_fp16_trains_as_fp32_does_but_for_its_precision():
    found = []
    for precision in (None, "fp16", "bf16"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        batches = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(9)]
        pipe = made(model, "pipedream", 2, batches[0][0], precision=precision)
        found.append([record.loss for record in pipe.train(batches)])
    assert found[1] == pytest.approx(found[0], rel=2e-3)
    assert found[2] == pytest.approx(found[0], rel=2e-2)
    assert found[1] != found[0]


class Replacing(torch.optim.Optimizer):
    """SGD as some write it: each update puts a new tensor in the weight's place."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data = weight.data - group["lr"] * weight.grad


@pytest.mark.parametrize(("schedule", "m", "options"), METHODS)
def test_an_optimizer_that_puts_new_tensors_in_the_place_of_weights_loses_no_update(schedule, m, options):
    torch.manual_seed(0)
    start = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))).double()
    batches = [(torch.randn(6, 4).double(), torch.randn(6, 4).double()) for _ in range(8)]
    found = []
    for kind in (torch.optim.SGD, Replacing):
        given = {"optimizer": lambda params, kind=kind: kind(params, lr=0.1), **options}
        pipe = made(copy.deepcopy(start), schedule, m, batches[0][0], **given)
        losses = [record.loss for record in pipe.train(batches)]
        found.append((losses, pipe.state_dict()))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-12)
    for name, weight in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], weight, rtol=0, atol=1e-12)
