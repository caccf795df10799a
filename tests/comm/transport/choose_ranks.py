"""What the ranks of the tests of `choose` do: `python choose_ranks.py SCENARIO`, with RANK and so on set."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings

import torch

from penstock.comm.transport.interface import LaneName, Message, MessageKey, lane_names
from penstock.comm.transport.open import OpenLanes, open_lanes
from penstock.comm.world.world import World, join
from penstock.errors import InputError

MIB = 2**20


def chain(world: World) -> tuple[list[LaneName], tuple[int, ...]]:
    """Two stages a rank, up and down again: the last two are on one rank, and lanes skip a stage too."""
    placement = (*range(world.size), *reversed(range(world.size)))
    edges = [(a, a + 1) for a in range(2 * world.size - 1)] + [(0, 2)]
    return lane_names(placement, edges, []), placement


def opened(world: World, transport: str | None = None, device: str = "cpu") -> OpenLanes:
    names, placement = chain(world)
    local = LaneName(world.size - 1, world.size)
    return open_lanes(world, [*names, local], [(rank,) for rank in placement], torch.device(device), transport)


def talk(lanes: OpenLanes, run: int, size: int = 100, count: int = 5, device: str = "cpu") -> None:
    """Every lane carries a few messages, asked for in the opposite order."""
    for microbatch in range(count):
        for name, sender in lanes.senders.items():
            values = {name.source: torch.full((size + microbatch,), 10.0 * name.target + microbatch, device=device)}
            sender.send(MessageKey(run, microbatch), Message(values, b"told", run))
    for microbatch in reversed(range(count)):
        for name, receiver in lanes.receivers.items():
            got = receiver.receive(MessageKey(run, microbatch))
            value = got.values[name.source]
            assert value.shape == (size + microbatch,)
            assert bool((value == 10 * name.target + microbatch).all())
            assert (got.metadata, got.stamp) == (b"told", run)


def kinds(lanes: OpenLanes) -> str:
    return json.dumps({f"{name.source}>{name.target}": kind for name, kind in lanes.kinds.items()})


def everyday(world: World) -> None:
    """Twice, as by two pipelines; one is closed, one is not."""
    lanes = opened(world)
    for run in range(3):
        talk(lanes, run)
    talk(lanes, 3, size=MIB, count=2)
    lanes.close()
    again = opened(world)
    talk(again, 0)
    print(kinds(lanes))


def wanted_gloo(world: World) -> None:
    lanes = opened(world, "gloo")
    talk(lanes, 0)
    print(kinds(lanes))


def one_gpu_for_all(world: World) -> None:
    """Tensors that are on a GPU, where NCCL cannot help."""
    for transport in (None, "gloo"):
        lanes = opened(world, transport, "cuda")
        talk(lanes, 0, device="cuda")
        talk(lanes, 1, size=MIB, device="cuda")
        print(kinds(lanes))
        lanes.close()


def no_memory_at_start(world: World) -> None:
    """One rank may not make files of any size, in memory or elsewhere."""
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lanes = opened(world)
    talk(lanes, 0)
    print(kinds(lanes), len(caught), *[str(warning.message) for warning in caught])


def no_memory_later(world: World) -> None:
    """Small messages find room, larger ones do not; small ones do again."""
    lanes = opened(world)
    if world.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        talk(lanes, 0)
        talk(lanes, 1, size=MIB)
        talk(lanes, 2)
        talk(lanes, 3, size=MIB)
    lanes.close()
    print(kinds(lanes), len(caught), *[str(warning.message) for warning in caught])


def different_wishes(world: World) -> None:
    try:
        opened(world, "gloo" if world.rank == 1 else None)
    except InputError as error:
        print(error)


def different_lanes(world: World) -> None:
    try:
        open_lanes(world, [LaneName(0, 1 + world.rank)], ((0,), (1,), (1,)), torch.device("cpu"))
    except InputError as error:
        print(error)


def forced_shared(world: World) -> None:
    try:
        opened(world, "shared")
    except InputError as error:
        print(error)


def leaves_early(world: World) -> None:
    """The first rank sends and is done; the last takes its time. All of it arrives, and all exit with 0."""
    lanes = opened(world)
    for microbatch in range(16):
        for name, sender in lanes.senders.items():
            if name.source < name.target:
                sender.send(MessageKey(0, microbatch), Message({0: torch.full((MIB,), 1.0 * microbatch)}))
    time.sleep(0.4 * world.rank)
    for microbatch in range(16):
        for name, receiver in lanes.receivers.items():
            if name.source < name.target:
                assert bool((receiver.receive(MessageKey(0, microbatch)).values[0] == microbatch).all())


def deserter(world: World) -> None:
    """A rank ends in the middle, with code 0 as if all were well."""
    lanes = opened(world)
    talk(lanes, 0)
    if world.rank == 1:
        sys.exit(0)
    began = time.time()
    try:
        talk(lanes, 1)
    finally:
        print(f"{time.time() - began:.2f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
    here = join(30)
    assert here is not None
    globals()[sys.argv[1]](here)
    print("done")
