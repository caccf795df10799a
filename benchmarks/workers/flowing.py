"""Asynchronous pipelines, which never flush: what one mini-batch takes while the pipe is full.

A sample is `SOME` mini-batches that follow each other, each rank by its own clock. All ranks begin it together, but in
the steady state a rank is ahead of the one before it by that one's backward: so as many mini-batches as there are ranks
go by first, and are not counted. The limit is the slowest stage's own time: what its forwards and backwards take by
autograd alone, with no pipeline around them; on the blocks, while both ranks compute. What the sleeps of the sleeping
pipeline take by themselves stands beside it.
"""

from __future__ import annotations

import copy
import time
from itertools import repeat

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.split_backward import Block
from benchmarks.workers import blocks, sleeping
from benchmarks.workers.contest import Contest
from benchmarks.workers.peer import Peer
from benchmarks.workers.table import Line

SOME = 6  # mini-batches of a sample


class Flowing:
    """Our asynchronous pipeline: a loop that is never left."""

    def __init__(self, schedule, stages, microbatches, loss, inputs, target):
        from penstock import Pipeline

        rows = max(1, len(inputs) // microbatches)
        self.pipe = Pipeline(
            stages,
            example=inputs[:rows],
            schedule=schedule,
            microbatches=microbatches,
            loss=loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
            verify=False,
            timeline=False,
        )
        self.records = self.pipe.train(repeat((inputs, target)))

    def zero(self):
        pass

    def step(self):
        for _ in range(dist.get_world_size()):
            next(self.records)
        begin = time.perf_counter()
        for _ in range(SOME):
            next(self.records)
        return {"each": (time.perf_counter() - begin) / SOME}


def pace(samples):
    """Seconds of a mini-batch on the slowest rank."""
    return max(samples.told(rank, "each") for rank in range(len(samples.all[0].told)))


class SleepingFlow(Contest):
    """The sleeping pipeline of four ranks, 1 KB, by each asynchronous method."""

    def __init__(self, rank):
        sleeping.exact_timers()
        numbers, ranks = sleeping.SIZES["1 KB"], dist.get_world_size()
        contenders = {"naps": sleeping.Naps(), "bare": sleeping.Bare(numbers)}
        for name, parts in (("pipedream", 1), ("2bw", 4), ("pipemare", 1)):
            x, y = torch.ones(parts, sleeping.ROW), torch.zeros(parts, 1)
            stages = [sleeping.Sleeper(numbers), *(sleeping.Sleeper() for _ in range(ranks - 1))]
            contenders[f"{name} {parts}"] = Flowing(name, stages, parts, sleeping.score, x, y)
        super().__init__(contenders)


class BlocksFlow(Contest):
    """Eight Transformer blocks on two ranks: the peer's 1F1B with its flush, ours without."""

    products = 12

    def __init__(self, rank):
        torch.manual_seed(0)
        each = blocks.LAYERS // blocks.RANKS
        stages = [nn.Sequential(*(Block(blocks.WIDTH) for _ in range(each))) for _ in range(blocks.RANKS)]
        x, y = (torch.randn(blocks.MICROBATCHES * blocks.ROWS, blocks.SEQUENCE, blocks.WIDTH) for _ in range(2))
        contenders = {"alone": blocks.Alone(copy.deepcopy(stages[rank]), rank == blocks.RANKS - 1)}
        contenders["peer 1f1b"] = Updated(
            Peer("1f1b", copy.deepcopy(stages[rank]), blocks.MICROBATCHES, blocks.mean_square, x, y)
        )
        for name in ("pipedream", "2bw", "pipemare"):
            contenders[name] = Flowing(name, copy.deepcopy(stages), blocks.MICROBATCHES, blocks.mean_square, x, y)
        super().__init__(contenders)


class Updated:
    """The peer with an update behind each of as many steps, since ours cannot do without."""

    def __init__(self, peer):
        self.peer = peer
        self.optimizer = torch.optim.SGD(peer.stage.submod.parameters(), lr=1e-6)

    def zero(self):
        pass

    def step(self):
        for _ in range(SOME):
            self.optimizer.zero_grad()
            self.peer.step()
            self.optimizer.step()


def own_time(found, who):
    """Seconds of a forward and a backward on the slowest rank."""
    return max(found[who].told(rank, "F + B") for rank in range(sleeping.RANKS))


def sleeping_lines(found):
    each = own_time(found, "bare")
    for name in ("pipedream 1", "2bw 4", "pipemare 1"):
        method, parts = name.split()
        seconds, limit = pace(found[name]), int(parts) * each
        wanted = {"wanted": "at most 1.05 x the stage's own time", "value": seconds / limit, "most": 1.05}
        yield Line(
            f"sleeping, steady, {method}, m {parts}", "s", seconds, None, limit, quiet=_quiet(found[name]), **wanted
        )


def block_lines(found):
    peer = found["peer 1f1b"].seconds / SOME
    alone = max(found["alone"].told(rank, "F") + found["alone"].told(rank, "B") for rank in range(blocks.RANKS))
    for name in ("pipedream", "2bw", "pipemare"):
        seconds = pace(found[name])
        wanted = {"wanted": "peer/ours at least 1.08, one of them", "value": peer / seconds, "least": 1.08}
        limit = blocks.MICROBATCHES * alone
        yield Line(f"8 blocks, {name} (peer 1f1b)", "s", seconds, peer, limit, quiet=_quiet(found[name]), **wanted)


def _quiet(samples):
    kept, every = len(samples.quiet), len(samples.all)
    return "NO QUIET SAMPLE" if not kept else "" if kept == every else f"({kept} of {every} samples were quiet)"
