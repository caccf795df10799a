"""Data parallelism on two ranks: ours (`stages=1, replicas=2`), DistributedDataParallel's, and the limit, in one run.

    python -m benchmarks.data_parallel [--repetitions 7]

Two cases. Blocks: 8 Transformer blocks of width 512, each rank half of the rows. Sleeping: a layer that sleeps for its
forward and backward and has 64 MB of gradients, so that what a step takes longer is the reduction. A step is forward,
backward, reduction and SGD; a sample is from a common start to the last rank's end. The limit is the same step of each
rank on its rows without any reduction. Medians; repetitions interleaved in shuffled order; those in which other
processes used the cores are made again, and where there was no quiet, that is said. One thread a process.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.split_backward import Block
from benchmarks.workers.team import Team
from penstock import Pipeline
from penstock.comm.world.world import join
from penstock.profiler.quiet import quiet_sample

RANKS, WAYS = 2, ("ours", "peer", "limit")
WANTED = {"blocks": 1.0, "sleeping": 1.3}  # times the peer's speed
LAYERS, WIDTH, SEQUENCE, ROWS = 8, 512, 64, 4
NUMBERS = 1 << 24  # float32 numbers of the sleeping layer: 64 MB
FORWARD, BACKWARD = 0.05, 0.10
TRIES, LEAD = 4, 0.005


class Sleep(torch.autograd.Function):
    """Sleeps, and has a gradient at once that was there before."""

    @staticmethod
    def forward(ctx, x, weight):
        time.sleep(FORWARD)
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD)
        return gradient, torch.zeros_like(ctx.saved_tensors[0])


class Sleeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMBERS))

    def forward(self, x):
        return Sleep.apply(x, self.weight)


def models(case):
    torch.manual_seed(0)
    if case == "sleeping":
        return Sleeper(), torch.randn(ROWS, 8, requires_grad=False)
    return nn.Sequential(*(Block(WIDTH) for _ in range(LAYERS))), torch.randn(ROWS, SEQUENCE, WIDTH)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


class Training:
    """One rank."""

    def __init__(self, rank):
        torch.set_num_threads(1)
        self.world = join(60)

    def prepare(self, case):
        model, self.x = models(case)
        first, last = (ROWS * (self.world.rank + at) // RANKS for at in range(2))
        self.part = self.x[first:last]
        self.pipe = Pipeline(
            copy.deepcopy(model), example=self.x, stages=1, replicas=RANKS, microbatches=1, optimizer=optimizer,
            loss=lambda result, _: result.square().mean(), timeline=False, verify=False,
        )  # fmt: skip
        self.peers = DistributedDataParallel(copy.deepcopy(model))
        self.alone = model
        self.steps = {"peer": (self.peers, optimizer(self.peers.parameters()))}
        self.steps["limit"] = self.alone, optimizer(self.alone.parameters())

    def seconds(self, way, start):
        time.sleep(max(0.0, start - time.perf_counter()))
        if way == "ours":
            self.pipe.step(self.x)
        else:
            model, stepping = self.steps[way]
            stepping.zero_grad()
            F.mse_loss(model(self.part), torch.zeros_like(self.part)).backward()
            stepping.step()
        return time.perf_counter() - start

    def close(self):
        pass


def case_medians(team, case, repetitions):
    """Median seconds of a step by way, and the fewest quiet samples of one."""
    team.ask("prepare", case)
    quiet, loud = ({way: [] for way in WAYS} for _ in range(2))
    for way in WAYS:
        team.ask("seconds", way, time.perf_counter() + LEAD)  # the first step makes what later ones find
    for _ in range(TRIES * repetitions):
        for way in random.sample(WAYS, len(WAYS)):
            if len(quiet[way]) < repetitions:
                with quiet_sample() as heard:
                    spent = max(team.ask("seconds", way, time.perf_counter() + LEAD))
                (quiet if heard.quiet else loud)[way].append(spent)
    return {way: statistics.median(quiet[way] or loud[way]) for way in WAYS}, min(map(len, quiet.values()))


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repetitions", type=int, default=7, help="quiet samples of each")
    chosen = options.parse_args()
    with Team(RANKS, Training) as team:
        for case, wanted in WANTED.items():
            medians, fewest = case_medians(team, case, chosen.repetitions)
            ours, peer, limit = (1e3 * medians[way] for way in WAYS)
            noise = "" if fewest == chosen.repetitions else f"   NOISY: {fewest} quiet samples"
            print(
                f"{case:8}  ours {ours:7.1f} ms   DistributedDataParallel {peer:7.1f} ms   limit {limit:7.1f} ms   "
                f"peer / ours {peer / ours:.2f} (wanted {wanted:.2f})   ours / limit {ours / limit:.2f}{noise}",
                flush=True,
            )


if __name__ == "__main__":
    main()
