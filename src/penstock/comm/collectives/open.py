"""Open the reducer of a group of ranks."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from penstock.comm.collectives import segment
from penstock.comm.collectives.interface import Reducer, Traffic
from penstock.comm.collectives.near import Near
from penstock.comm.collectives.reducer import HostReducer
from penstock.comm.collectives.worker import Worker
from penstock.comm.world.world import World
from penstock.errors import InputError

NAP = 0.002  # seconds between two looks for the others
_opened: defaultdict[tuple[object, ...], Iterator[int]] = defaultdict(itertools.count)


@dataclass(frozen=True)
class Facts:
    """What a rank says of itself, for the group to decide by: the memory that it has to share, or why it has none."""

    process: int
    file: int = -1
    mark: str = ""
    trouble: str = ""


def open_reducer(world: World, ranks: tuple[int, ...], device: torch.device) -> Reducer:
    """This rank's part in the reductions of a group. Every rank of the group has to call, and no other."""
    _require_group(world, ranks)
    group = ranks, world.watch.renewal
    meeting = Meeting(world, ranks, PrefixStore(f"reduce/{group}/{next(_opened[group])}", world.store))
    worker = Worker(world.rank, world.watch)
    near = Near(ranks, _share(meeting), worker, Traffic())
    return HostReducer(ranks, near, worker, meeting.at_fault)


class Meeting:
    """The ranks of a group exchange a few words over the store."""

    def __init__(self, world: World, ranks: tuple[int, ...], store: Store) -> None:
        self.world, self.ranks, self.store = world, ranks, store

    def exchange(self, what: str, words: str) -> list[str]:
        """The words of all ranks, in their order; waits for them."""
        keys = {rank: f"{what}/{rank}" for rank in self.ranks}
        self.store.set(keys[self.world.rank], words)
        began = time.monotonic()
        for rank, key in keys.items():
            while not self.store.check([key]):
                self.world.watch.check(rank, time.monotonic() - began)
                time.sleep(NAP)
        return [self.store.get(key).decode() for key in keys.values()]

    def at_fault(self, words: str) -> list[str]:
        return self.exchange("at fault", words)


def _share(meeting: Meeting) -> list[segment.Segment]:
    """The memory of all ranks of a host, in their order. Afterwards nobody can open it any more."""
    world, ranks = meeting.world, meeting.ranks
    own, file = segment.create(f"penstock-reduce-{world.rank}", len(ranks))
    mine = Facts(os.getpid(), file, own.mark.hex())
    facts = [Facts(**json.loads(said)) for said in meeting.exchange("memory", json.dumps(asdict(mine)))]
    segments = [
        own if rank == world.rank else segment.open_at(f.process, f.file, bytes.fromhex(f.mark), len(ranks))
        for rank, f in zip(ranks, facts, strict=True)
    ]
    meeting.exchange("opened", "")
    os.close(file)
    return segments


def _require_group(world: World, ranks: tuple[int, ...]) -> None:
    if len(ranks) < 2 or list(ranks) != sorted(set(ranks)) or not 0 <= ranks[0] <= ranks[-1] < world.size:
        raise InputError(
            f"two ranks or more of 0 to {world.size - 1} to reduce over, ascending", list(ranks), "correct the group"
        )
    if world.rank not in ranks:
        raise InputError(
            f"rank {world.rank} in the group that it opens a reducer for", list(ranks), "leave it to those ranks"
        )
