"""Run as one rank: trains, and tells rank 0's file what was measured.

timeline_rank.py timelines OUT        sleeping stages under several schedules, one after the other
timeline_rank.py replicas OUT         the same with replicas of the first pipeline rank, of wide layers to reduce
timeline_rank.py memory OUT METHOD    big activations, so that they outweigh all else
timeline_rank.py offsets OUT          clocks that differ by what SHIFT in the environment says
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from freed import give_back_what_is_freed
from penstock import Pipeline
from penstock.comm.world.world import World, join
from penstock.training.measurement.clock_offsets import offsets

RANK = int(os.environ.get("RANK", "0"))
FORWARD, BACKWARD = 0.004, 0.008
WIDE = 512
WITH_REPLICAS = {"1f1b": {"clip": 1.0}, "zb-h1": {}, "interleaved": {"chunks": 2}}
SCHEDULES = {"gpipe": {}, "1f1b": {"clip": 1.0}, "zb-h1": {}, "interleaved": {"chunks": 2, "clip": 1.0}}


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD)
        return gradient


class Sleeper(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return Nap.apply(self.linear(x))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


def timelines():
    torch.manual_seed(0)
    x, ranks, found = torch.randn(8, 16), int(os.environ["WORLD_SIZE"]), {}
    for name, asked in SCHEDULES.items():
        model = nn.Sequential(*(Sleeper() for _ in range(ranks * asked.get("chunks", 1))))
        options = {"stages": ranks, "schedule": name, "microbatches": 8, **asked}
        pipe = Pipeline(model, example=x[:1], loss=nn.functional.mse_loss, optimizer=sgd, **options)
        for _ in range(6):
            pipe.step(x, x)
        measured = pipe.measured()
        found[name] = {
            "measured": [measured.timeline(step).to_json() for step in range(6)],
            "predicted": measured.predicted().to_json(),
            "last": pipe.timeline().to_json(),
        }
    return found


def replicas():
    """Stages of two replicas and one; the bytes that each rank has received in its reductions, by step."""
    torch.manual_seed(0)
    x, found = torch.randn(16, WIDE), {}
    for name, asked in WITH_REPLICAS.items():
        layers = 2 * asked.get("chunks", 1)
        model = nn.Sequential(*(Sleeper(WIDE) for _ in range(layers)))
        how = {"stages": 2, "replicas": [2, 1], "schedule": name, "microbatches": 4, **asked}
        pipe = Pipeline(model, example=x[:4], loss=nn.functional.mse_loss, optimizer=sgd, verify=False, **how)
        reducers = {id(reducer): reducer for reducer in pipe.flush.sums.reducers.values()}.values()
        received = []
        for _ in range(6):
            before = sum(reducer.traffic.shared + reducer.traffic.network for reducer in reducers)
            pipe.step(x, x)
            received.append(sum(reducer.traffic.shared + reducer.traffic.network for reducer in reducers) - before)
        measured = pipe.measured()
        parts = {part: values.tolist() for part, values in vars(measured.footprint).items()}
        found[name] = {
            "measured": [measured.timeline(step).to_json() for step in range(6)],
            "predicted": measured.predicted().to_json(),
            "reduce": measured.predicted().costs.reduce.tolist(),
            "footprint": parts,
            "received": received,
            "gradients": [sum(p.numel() * 4 for p in pipe.split.used(at)) for at in range(pipe.split.pieces)],
        }
        pipe.close()
    return found


def memory(method):
    """Rows enough that what one micro-batch keeps is 8 MiB a layer."""
    give_back_what_is_freed()
    torch.manual_seed(0)
    x = torch.randn(4 * 16384, 64)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
    options = {"stages": 2, "schedule": method, "microbatches": 4, "verify": False}
    pipe = Pipeline(
        nn.Sequential(*layers), example=x[:4], loss=nn.functional.mse_loss, optimizer=torch.optim.Adam, **options
    )
    for _ in range(3):
        pipe.step(x, x)
    measured = pipe.measured()
    kept = {name: values.tolist() for name, values in vars(measured.footprint).items()}
    return {"ranks": [dataclasses.asdict(rank) for rank in measured.memory()], "kept": kept}


def shifted():
    world = join()
    assert isinstance(world, World)
    shifts = [int(shift) for shift in os.environ["SHIFT"].split()]
    apart = dataclasses.replace(world, hosts=tuple(os.environ["HOSTS"].split()))
    return offsets(apart, lambda: time.perf_counter_ns() + shifts[RANK])


def main(what, out, *arguments):
    torch.set_num_threads(1)
    found = {"timelines": timelines, "replicas": replicas, "memory": memory, "offsets": shifted}[what](*arguments)
    Path(f"{out}.{RANK}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
