"""Every synchronous schedule, 1 to 4 ranks: losses, gradients and weights are those of plain training."""

from __future__ import annotations

import functools

import pytest
import torch

import plain
from penstock import Pipeline, Schedule, from_csv, schedule

torch.set_num_threads(1)

NAMED = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "auto")
OPTIONS = {
    "dapple-pa": ("dapple", {"policy": "pa"}),
    "dapple-pb": ("dapple", {"policy": "pb"}),
    "dualpipe-v": ("dualpipe-v", {"overlap": False}),
    "dualpipe-v overlapped": ("dualpipe-v", {"overlap": True}),
}
# A person's own: the second rank takes micro-batches in another order, and its weight gradients last.
OWN = "0F0,0F1,0F2,0F3,0B1,0B0,0B2,0B3\n1F1,1F0,1I1,1I0,1F2,1F3,1I2,1I3,1W0,1W3,1W1,1W2\n"
TOLERANCE = {torch.float64: (1e-12, 1e-10), torch.float32: (1e-5, 1e-5)}  # of gradients and losses, of weights


def asked(name: str, ranks: int) -> tuple[str | Schedule, int]:
    """What to hand the Pipeline as its schedule, and how many micro-batches that takes."""
    parts = 2 * ranks if name.startswith("dualpipe") else 4 if ranks != 3 else 6
    if name in OPTIONS:
        method, options = OPTIONS[name]
        return schedule(method, stages=ranks, microbatches=parts, **options), parts
    return name, parts


def batches_of(kind: str, dtype: torch.dtype) -> plain.Case:
    """Five batches, two of which have fewer rows than there are micro-batches."""
    given = plain.case(kind, rows=12, dtype=dtype)
    for at, rows in ((2, 3), (4, 1)):
        given.batches[at] = tuple(part[:rows] for part in given.batches[at])
    return given


@functools.cache
def reference(kind: str, dtype: torch.dtype, parts: int) -> tuple[list[float], dict, dict]:
    """Losses and weights of five plain steps, and the first step's gradients. One run serves all schedules."""
    given = batches_of(kind, dtype)
    losses, model = plain.trained(given, parts)
    first = given.fresh()
    plain.backward(first, given.loss, *given.batches[0], parts)
    return losses, plain.gradients(first), plain.weights(model)


def compare(kind: str, dtype: torch.dtype, ranks: int, method: str | Schedule, parts: int) -> None:
    given = batches_of(kind, dtype)
    losses, gradients, weights = reference(kind, dtype, parts if given.by_parts else 1)
    near, after = TOLERANCE[dtype]
    options = {"example": given.example, "stages": ranks, "schedule": method, "microbatches": parts, "loss": given.loss}
    still = Pipeline(given.fresh(), **options, verify=False)
    still.step(*given.batches[0])
    assert plain.off(plain.gradients(still.model), gradients) < near
    pipe = Pipeline(given.fresh(), **options, optimizer=plain.adamw)
    found = [step.loss for step in pipe.train(given.batches)]
    assert max(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True)) < near
    assert plain.off(plain.weights(pipe.model), weights) < after


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [*NAMED, *OPTIONS])
def test_a_tied_gpt(name, ranks, dtype):
    compare("gpt", dtype, ranks, *asked(name, ranks))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", [*NAMED, *OPTIONS])
def test_a_conv_net_with_batch_norm(name, dtype):
    compare("conv", dtype, 2, *asked(name, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("name", "ranks"), [("gpipe", 4), ("1f1b", 3), ("zb-h2", 4), ("zb-v", 3), ("interleaved", 4)])
def test_an_mlp(name, ranks, dtype):
    compare("mlp", dtype, ranks, *asked(name, ranks))


@pytest.mark.parametrize("kind", ["gpt", "conv", "mlp"])
def test_a_schedule_that_a_person_wrote(kind):
    compare(kind, torch.float64, 2, from_csv(OWN), 4)
