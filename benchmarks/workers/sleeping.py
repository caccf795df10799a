"""Stages that only sleep: what a step takes longer than the ideal is the runtime's own.

Forward and backward hand on a view of what they got, so no stage touches the memory of an activation; the first stage
hands out an activation, and the loss a gradient, that were made beforehand. A row of the batch is 1 KB in all cases, as
a row of tokens is small beside what a model makes of it. Every stage has one parameter, a number, because a stage
without one has nothing to train.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.workers.contest import Contest
from benchmarks.workers.ours import Ours
from benchmarks.workers.peer import Peer
from benchmarks.workers.table import line
from penstock import schedule

RANKS, MICROBATCHES = 4, 16
FORWARD, BACKWARD = 0.005, 0.010
ROW = 1 << 8  # numbers in a row of the batch
SIZES = {"1 KB": 1 << 8, "4 MB": 1 << 20}  # float32 numbers in an activation


def ideal(ranks=RANKS):
    """Seconds of a step of any of these schedules: the last micro-batch waits for the others, then passes all ranks."""
    return (MICROBATCHES + ranks - 1) * (FORWARD + BACKWARD)


@cache
def made(numbers):
    """An activation, or a gradient of one, that is there before anybody needs it."""
    return torch.ones(1, numbers)


class Sleep(torch.autograd.Function):
    """Hands on what it got; the first stage, which gets data, an activation of so many numbers."""

    @staticmethod
    def forward(ctx, x, number, numbers):
        time.sleep(FORWARD)
        result = x if numbers is None else made(numbers)
        return result.view_as(result)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD)
        return gradient.view_as(gradient) if ctx.needs_input_grad[0] else None, gradient.new_ones(()), None


class Sleeper(nn.Module):
    def __init__(self, numbers=None):
        super().__init__()
        self.number, self.numbers = nn.Parameter(torch.zeros(())), numbers

    def forward(self, x):
        return Sleep.apply(x, self.number, self.numbers)


class Score(torch.autograd.Function):
    """A loss that reads one number."""

    @staticmethod
    def forward(ctx, x):
        ctx.numbers = x.numel()
        return x.flatten()[0].clone()

    @staticmethod
    def backward(ctx, _):
        gradient = made(ctx.numbers)
        return gradient.view_as(gradient)


def score(result, target):
    return Score.apply(result)


def exact_timers():
    """Linux wakes a sleeper up to 50 microseconds late to save power; compute, which sleeps stand for, never is."""
    PR_SET_TIMERSLACK = 29
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # nanoseconds, of this thread


class Naps:
    """The sleeps of a step's forwards and backwards and nothing else: timers are late, whoever runs the pipeline."""

    def zero(self):
        pass

    def step(self):
        begin = time.perf_counter()
        for _ in range(MICROBATCHES):
            time.sleep(FORWARD)
            time.sleep(BACKWARD)
        return {"F + B": (time.perf_counter() - begin) / MICROBATCHES}


class Bare:
    """Forwards and backwards of a stage with the same sleeps, by autograd alone: no pipeline, nothing to wait for.

    Each begins on caches that the sleep has left cold, which a stage that computes would not; whoever runs the
    pipeline pays that.
    """

    def __init__(self, numbers):
        self.stage, self.x = Sleeper(), torch.ones(1, numbers, requires_grad=True)

    def zero(self):
        self.stage.zero_grad()

    def step(self):
        begin = time.perf_counter()
        for _ in range(MICROBATCHES):
            torch.autograd.backward(score(self.stage(self.x.detach().requires_grad_()), None))
        return {"F + B": (time.perf_counter() - begin) / MICROBATCHES}


class Sleeping(Contest):
    """On one rank: for every size of activation, the peer's schedules and ours."""

    def __init__(self, rank, ours=True, sizes=SIZES):
        exact_timers()
        ranks, contenders = dist.get_world_size(), {"naps": Naps(), "bare": Bare(min(sizes.values()))}
        for size, numbers in sizes.items():
            x, y = torch.ones(MICROBATCHES, ROW), torch.zeros(MICROBATCHES, 1)
            for name in ("gpipe", "1f1b"):
                module = Sleeper(None if rank else numbers)
                contenders[f"{size} peer {name}"] = Peer(name, module, MICROBATCHES, score, x, y)
            for name, method in methods(ranks).items() if ours else ():
                stages = [Sleeper(numbers), *(Sleeper() for _ in range(ranks - 1))]
                contenders[f"{size} ours {name}"] = Ours(method, stages, MICROBATCHES, score, x, y)
        super().__init__(contenders)


def methods(ranks=RANKS):
    """Ours, by the name in the table."""
    deep = schedule("dapple", stages=ranks, microbatches=MICROBATCHES, policy="pb")
    return {"gpipe": "gpipe", "1f1b": "1f1b", "dapple pb": deep}


def lines(found, ours):
    """The lines of the table, from what was collected."""
    for size in SIZES:
        peers = {name: found[f"{size} peer {name}"] for name in ("gpipe", "1f1b")}
        if not ours:
            yield from (line(f"sleeping, {size}, {name}", None, peer, ideal()) for name, peer in peers.items())
            continue
        mine = {name: found[f"{size} ours {name}"] for name in methods()}
        for name, samples in mine.items():
            peer, other = (peers[name], "") if name in peers else (peers["1f1b"], " (peer 1f1b)")
            wanted = _wanted(size, name, peer, mine)
            yield line(f"sleeping, {size}, {name}{other}", samples, peer, ideal(), **wanted)


def _wanted(size, name, peer, mine):
    seconds = {name: samples.seconds for name, samples in mine.items()}
    if (size, name) == ("1 KB", "1f1b"):
        return {"wanted": "ours/limit at most 1.06", "value": seconds[name] / ideal(), "most": 1.06}
    if (size, name) == ("4 MB", "1f1b"):
        return {"wanted": "peer/ours at least 1.3", "value": peer.seconds / seconds[name], "least": 1.3}
    if (size, name) == ("4 MB", "dapple pb"):
        best = min(seconds["1f1b"], seconds["dapple pb"])
        return {"wanted": "this or 1f1b at most 1.15 x limit", "value": best / ideal(), "most": 1.15}
    return {}
