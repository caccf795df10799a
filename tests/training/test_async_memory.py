"""How many buffers of a weight are alive, counted without the engine's books.

Every storage that a weight has ever shown is remembered by a weak reference, which knows when the last user of it is
gone, autograd included. Whatever else has the weight's shape is found among all of Python's objects.
"""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import penstock

torch.set_num_threads(1)
SIZES = (37, 41, 43, 47, 53, 59)  # each stage's matrix has a shape of its own


class Census:
    """Of one stage's matrix."""

    def __init__(self, layer: nn.Linear) -> None:
        self.weight = layer.weight
        self.shown: set[StorageWeakRef] = set()
        self.most = self.besides = 0
        layer.register_forward_pre_hook(lambda *_: self.look())
        layer.register_forward_hook(self.look_in_the_backward)

    def look_in_the_backward(self, layer: nn.Module, given: Any, made: torch.Tensor) -> None:
        if made.requires_grad:
            made.register_hook(lambda _: self.look())

    def look(self) -> None:
        self.shown.add(StorageWeakRef(self.weight.untyped_storage()))
        self.most = max(self.most, self.alive())

    def alive(self) -> int:
        self.shown = {one for one in self.shown if not one.expired()}
        return len(self.shown)

    def of_its_shape(self) -> int:
        found = (
            t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and t.shape == self.weight.shape
        )
        return len({t.untyped_storage().data_ptr() for t in found})


def censuses(schedule: str, n: int, m: int, besides: bool = False, **options: Any) -> list[Census]:
    """The most buffers on each stage, over a run that becomes steady."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(SIZES[: n + 1])]
    found = [Census(layer) for layer in layers]

    def watched(params: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(params, lr=0.01)
        for number, layer in enumerate(layers):
            if any(p is layer.weight for p in optimizer.param_groups[0]["params"]):
                optimizer.register_step_post_hook(lambda *_, number=number: found[number].look())
        return optimizer

    batches = [(torch.randn(m, SIZES[0]), torch.randn(m, SIZES[n])) for _ in range(3 * n)]
    if besides:
        gc.collect()  # else what other tests have left behind is counted
    pipe = penstock.Pipeline(
        nn.Sequential(*layers), example=batches[0][0], stages=n, cuts=[str(i) for i in range(1, n)], schedule=schedule,
        microbatches=m, loss=F.mse_loss, optimizer=watched, verify=False, **options,
    )  # fmt: skip
    for record in pipe.train(batches):
        if besides and record.index == 2 * n:  # no gradients are there between two records of a steady run with m = 1
            for census in found:
                census.besides = census.of_its_shape() - census.alive()
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_pipedream_keeps_as_many_versions_as_it_runs_forwards_ahead_and_one(n):
    assert [census.most for census in censuses("pipedream", n, 1)] == [n - stage for stage in range(n)]


def test_pipedream_with_micro_batches_keeps_one_for_each_mini_batch_in_flight():
    assert [census.most for census in censuses("pipedream", 4, 2)] == [3, 2, 2, 1]


@pytest.mark.parametrize("n", [2, 4])
def test_vertical_sync_keeps_as_many_on_every_stage_as_there_are_stages(n):
    assert [census.most for census in censuses("pipedream", n, 1, vertical_sync=True)] == [n] * n


@pytest.mark.parametrize(("n", "m"), [(3, 3), (3, 5), (4, 4)])
def test_2bw_keeps_two(n, m):
    assert [census.most for census in censuses("2bw", n, m)] == [2] * n


def test_2bw_with_an_agreed_norm_keeps_no_more():
    """An update waits for the forward that first uses it. On the last stage, nobody needs the older version then."""
    assert [census.most for census in censuses("2bw", 4, 4, clip=0.1)] == [2, 2, 2, 1]


def test_without_stashing_there_is_one():
    found = censuses("pipedream", 4, 1, besides=True, stash=False)
    assert [census.most for census in found] == [1] * 4
    assert [census.besides for census in found] == [0] * 4


def test_pipemare_keeps_one_its_delta_and_the_corrected_weights():
    """A stage without delay, the last one, needs no correction."""
    found = censuses("pipemare", 4, 1, besides=True)
    assert [census.most for census in found] == [2, 2, 2, 1]  # newest, corrected
    assert [census.besides for census in found] == [1, 1, 1, 0]  # delta


def test_pipemare_without_t2_keeps_one():
    assert [census.most + census.besides for census in censuses("pipemare", 3, 1, besides=True, t2=False)] == [1, 1, 1]


def test_what_is_counted_is_what_the_engine_says():
    """Its own books, for a stage of pipedream: bytes of weight and bias."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(SIZES[:4])]
    batches = [(torch.randn(1, SIZES[0]), torch.randn(1, SIZES[3])) for _ in range(9)]
    pipe = penstock.Pipeline(
        nn.Sequential(*layers), example=batches[0][0], stages=3, cuts=["1", "2"], schedule="pipedream", microbatches=1,
        loss=F.mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.01), verify=False,
    )  # fmt: skip
    list(pipe.train(batches))
    wanted = {s: 4 * (3 - s) * (SIZES[s] * SIZES[s + 1] + SIZES[s + 1]) for s in range(3)}
    assert pipe.executor.weights.bytes == wanted
