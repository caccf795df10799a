"""Eight Transformer blocks on two ranks: how near real compute comes to its schedule's ideal.

The ideal of a schedule is its makespan without transfers, from what each stage's forward and backward take in the same
run, while both ranks compute and nothing is sent.
"""

from __future__ import annotations

import copy
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.split_backward import Block
from benchmarks.workers.contest import Contest
from benchmarks.workers.ours import Ours
from benchmarks.workers.peer import Peer
from benchmarks.workers.table import line
from penstock import schedule, simulate
from penstock.model.split_backward import WeightQueue, deferring

RANKS, MICROBATCHES, ROWS = 2, 8, 4
SOME = 4  # micro-batches that the stages are timed with
LAYERS, WIDTH, SEQUENCE = 8, 512, 128


def mean_square(result, target):
    return F.mse_loss(result, target)


class Alone:
    """One stage's forwards and backwards with no pipeline around them: whole, and in two halves."""

    def __init__(self, module, last):
        self.module, self.last = module, last
        self.x = torch.randn(ROWS, SEQUENCE, WIDTH)
        self.gradient = torch.randn(ROWS, SEQUENCE, WIDTH)

    def zero(self):
        self.module.zero_grad()

    def step(self):
        """Seconds of F and B, and of F, I and W where the backward is cut in two."""
        marks = [self._whole() for _ in range(SOME)]
        halves = [self._halves() for _ in range(SOME)]
        parts = zip(("F", "B"), zip(*marks, strict=True), strict=True)
        cut = zip(("F of two", "I", "W"), zip(*halves, strict=True), strict=True)
        return {name: statistics.median(seconds) for name, seconds in (*parts, *cut)}

    def _forward(self):
        x = self.x.detach().requires_grad_(self.last)  # the first stage's input is data
        result = self.module(x)
        return mean_square(result, self.gradient) if self.last else result

    def _backward(self, result):
        result.backward(None if self.last else self.gradient)

    def _whole(self):
        begin = time.perf_counter()
        result = self._forward()
        middle = time.perf_counter()
        self._backward(result)
        return middle - begin, time.perf_counter() - middle

    def _halves(self):
        begin, queue = time.perf_counter(), WeightQueue()
        with deferring(queue):
            result = self._forward()
        middle = time.perf_counter()
        with deferring(queue):
            self._backward(result)
        half = time.perf_counter()
        queue.run()
        return middle - begin, half - middle, time.perf_counter() - half


class Blocks(Contest):
    """On one rank: the peer's schedules, ours, and the stage alone."""

    products = 12

    def __init__(self, rank, ours=True):
        torch.manual_seed(0)
        each = LAYERS // RANKS
        stages = [nn.Sequential(*(Block(WIDTH) for _ in range(each))) for _ in range(RANKS)]
        x, y = (torch.randn(MICROBATCHES * ROWS, SEQUENCE, WIDTH) for _ in range(2))
        contenders = {"alone": Alone(copy.deepcopy(stages[rank]), rank == RANKS - 1)}
        for name in ("gpipe", "1f1b"):
            module = copy.deepcopy(stages[rank])
            contenders[f"peer {name}"] = Peer(name, module, MICROBATCHES, mean_square, x, y)
        for name in ("1f1b", "zb-h1") if ours else ():
            contenders[f"ours {name}"] = Ours(name, copy.deepcopy(stages), MICROBATCHES, mean_square, x, y)
        super().__init__(contenders)

    def agree(self, names):
        """The same training everywhere, or the times mean nothing."""
        expected = self.contenders["peer 1f1b"].gradients()
        for name in names:
            torch.testing.assert_close(self.contenders[name].gradients(), expected, rtol=1e-3, atol=1e-5)


def ideal(name, alone):
    """Seconds of a step of that schedule if transfers and the runtime took no time."""
    if name.startswith("zb"):
        parts = {"forward": "F of two", "input_grad": "I", "weight_grad": "W"}
    else:
        parts = {"forward": "F", "input_grad": "B"}
    costs = {"weight_grad": [0.0] * RANKS}
    costs |= {cost: [alone.told(rank, part) for rank in range(RANKS)] for cost, part in parts.items()}
    return simulate(schedule(name, stages=RANKS, microbatches=MICROBATCHES), **costs).makespan


def lines(found, ours):
    """The lines of the table, from what was collected."""
    alone = found["alone"]
    plain = found["peer 1f1b"]
    yield line("8 blocks, gpipe", None, found["peer gpipe"], ideal("gpipe", alone))
    for name, least in (("1f1b", 1.0), ("zb-h1", 1.05)):
        mine = found[f"ours {name}"] if ours else None
        value = plain.seconds / mine.seconds if mine else None
        wanted = {"wanted": f"peer/ours at least {least:g}", "value": value, "least": least} if mine else {}
        peer = "" if name == "1f1b" else " (peer 1f1b)"
        yield line(f"8 blocks, {name}{peer}", mine, plain, ideal(name, alone), **wanted)
