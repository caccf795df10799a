"""Ignored tokens in training without a flush: the published recursion with each mini-batch's own mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import penstock
import recursion_models
from segments import ADAMW, WITHIN, Method, Recursion, off, optimizer, pipeline, trained, weights

torch.set_num_threads(1)
KEPT, LENGTH, ROWS = 13, 5, 8  # tokens that are counted in each mini-batch, wherever they are


def batches(model: recursion_models.Model, count: int) -> list[tuple[Tensor, Tensor]]:
    """All have as many tokens that are counted, spread over the micro-batches as it comes; some have none."""
    found = model.batches(count, ROWS)
    for number, (_, y) in enumerate(found):
        flat = y.view(-1)
        left = torch.randperm(len(flat) // (1 + number % 3))[:KEPT]
        ignored = torch.ones_like(flat, dtype=torch.bool)
        ignored[left] = False
        flat[ignored] = -100
    return found


def share_of_the_mean(m: int):
    """The tokens' sum, divided so that the recursion's mean over rows gives the mini-batch's mean over tokens."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum") * m / KEPT

    return loss


def pure(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def composite(out: Tensor, y: Tensor) -> Tensor:
    return 0.5 * F.cross_entropy(out.flatten(0, 1), y.flatten()) + 0.1 * out.square().mean()


@pytest.mark.parametrize("method", [Method("2bw", 4), Method("pipedream", 2), Method("pipemare", 4)], ids=str)
@pytest.mark.parametrize("kind", ["pure", "composite"])
def test_each_mini_batch_has_its_own_mean(method, kind):
    model = recursion_models.gpt(3, width=4, length=LENGTH)
    given = batches(model, 12)
    theirs = share_of_the_mean(method.m)
    if kind == "composite":
        summed = theirs
        theirs = lambda out, y: 0.5 * summed(out, y) + 0.1 * out.square().mean()  # noqa: E731
    losses = Recursion(replace(model, loss=theirs), method, ADAMW)
    wanted = losses.run(given)
    pipe = pipeline(model, method, ADAMW, loss=pure if kind == "pure" else composite, verify=True)
    assert trained(pipe, given) == pytest.approx(wanted, abs=WITHIN)
    assert off(weights(pipe), losses.weights()) < WITHIN


def own_mean(out: Tensor, y: Tensor) -> Tensor:
    every = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")
    return every.sum() / (y >= 0).sum().clamp(min=1)


@pytest.mark.parametrize("schedule", ["2bw", "pipemare"])
def test_a_mean_of_the_users_own_is_refused_while_batches_are_in_flight(schedule):
    model = recursion_models.gpt(3, width=4, length=LENGTH)
    even = [(x, y.clamp(min=1)) for x, y in model.batches(5, ROWS)]
    pipe = penstock.Pipeline(
        model.module, example=even[0][0], cuts=["1", "2"], microbatches=4, schedule=schedule, loss=own_mean,
        optimizer=optimizer(ADAMW),
    )  # fmt: skip
    with pytest.raises(penstock.InputError, match="weighs rows by -100 in the target"):
        trained(pipe, [*even, *batches(model, 1)])
    assert pipe.index == len(even)  # those before are trained to their end
