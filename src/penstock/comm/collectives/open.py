"""Open the reducer of a group of ranks, over the memory or network between them.

    one host          shared memory
    several hosts     shared memory within each, gloo between the first ranks of each
    a GPU each        NCCL

Without shared memory, or with PENSTOCK_TRANSPORT=gloo, each rank is treated as a host of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from penstock.comm.collectives import segment
from penstock.comm.collectives.far import Far
from penstock.comm.collectives.interface import ReceivedBytes, Reducer
from penstock.comm.collectives.nccl import NcclReducer
from penstock.comm.collectives.near import Near
from penstock.comm.collectives.reducer import HostReducer
from penstock.comm.collectives.rounds import Group
from penstock.comm.collectives.worker import Worker
from penstock.comm.transport.fallback import warn_slow
from penstock.comm.transport.open import VARIABLE, requested_transport
from penstock.comm.transport.shared import mapping
from penstock.comm.world.rendezvous import run_interruptible
from penstock.comm.world.world import World
from penstock.errors import InputError

NAP = 0.002  # seconds between two polls for the other ranks
_opened: defaultdict[tuple[object, ...], Iterator[int]] = defaultdict(itertools.count)


@dataclass(frozen=True)
class GroupFacts:
    """Facts about a rank by which the group decides: its shared memory, or why it has none."""

    wish: str | None
    process: int
    file: int = -1
    mark: str = ""
    trouble: str = ""


def open_reducer(world: World, ranks: tuple[int, ...], device: torch.device) -> Reducer:
    """Return this rank's reducer of a group. Every rank of the group has to call, and no other."""
    _require_group(world, ranks)
    group = ranks, world.watch.renewal
    meeting = Meeting(world, ranks, PrefixStore(f"reduce/{group}/{next(_opened[group])}", world.store))
    worker, traffic = Worker(world.rank, world.watch), ReceivedBytes()
    if device.type != "cpu":
        _require_gpus(meeting, device)
        return NcclReducer(ranks, device, PrefixStore("nccl", meeting.store), worker, meeting.at_fault)
    hosts, segments = _share(meeting)
    leaders = tuple(host[0] for host in hosts.hosts)
    far = None
    if len(leaders) > 1 and world.rank in leaders:
        store = PrefixStore("gloo", meeting.store)
        far = run_interruptible(lambda: Far(leaders, store, worker, traffic), partial(meeting.check, leaders))
    return HostReducer(ranks, Near(hosts, segments, worker, traffic, far), worker, meeting.at_fault)


class Meeting:
    """An exchange of short strings between the ranks of a group, over the store."""

    def __init__(self, world: World, ranks: tuple[int, ...], store: Store) -> None:
        self.world, self.ranks, self.store = world, ranks, store

    def exchange(self, what: str, words: str) -> list[str]:
        """Wait for the strings of all ranks, and return them in the order of the ranks."""
        keys = {rank: f"{what}/{rank}" for rank in self.ranks}
        self.store.set(keys[self.world.rank], words)
        began = time.monotonic()
        for rank, key in keys.items():
            while not self.store.check([key]):
                self.world.watch.check(rank, time.monotonic() - began)
                time.sleep(NAP)
        return [self.store.get(key).decode() for key in keys.values()]

    def check(self, ranks: tuple[int, ...], waited: float) -> None:
        for rank in ranks:
            self.world.watch.check(rank, waited)

    def at_fault(self, words: str) -> list[str]:
        return self.exchange("at fault", words)


def _require_gpus(meeting: Meeting, device: torch.device) -> None:
    """Raise unless each rank has one of its own that NCCL can use."""
    usable = device.type == "cuda" and dist.is_nccl_available()
    gpu = str(torch.cuda.get_device_properties(device).uuid) if usable else ""
    host = os.environ.get("NCCL_HOSTID", meeting.world.hosts[meeting.world.rank])
    gpus = meeting.exchange("gpus", f"{host}/{gpu}" if usable else "")
    if "" in gpus or len(set(gpus)) < len(gpus):
        raise InputError(
            "a GPU of its own for each replica of a stage, and NCCL",
            f"{len(set(gpus) - {''})} for ranks {', '.join(map(str, meeting.ranks))}",
            "give each rank another device, or train these replicas on the CPU",
        )


def _share(meeting: Meeting) -> tuple[Group, list[segment.Segment]]:
    """Return the ranks by host, and the memory of those of this host, which cannot be opened any more afterwards."""
    world, ranks = meeting.world, meeting.ranks
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_host[world.hosts[rank]].append(rank)
    near = by_host[world.hosts[world.rank]]
    mine, own = _offer(world.rank, len(near))
    facts = dict(zip(ranks, _facts(meeting, mine, len(by_host)), strict=True))
    trouble = next((fact.trouble for fact in facts.values() if fact.trouble), "")
    segments = []
    try:
        if not trouble and own is not None:
            segments = [own if rank == world.rank else _opened_of(facts[rank], len(near)) for rank in near]
    except OSError as error:
        trouble = str(error)
    troubles = [said for said in meeting.exchange("opened", trouble) if said]
    if mine.file >= 0:
        os.close(mine.file)
    if not troubles:
        return Group(tuple(map(tuple, by_host.values())), [*by_host].index(world.hosts[world.rank])), segments
    if mine.wish != "gloo":
        warn_slow(troubles[0], "between the ranks of this host that sum their gradients")
    return Group(tuple((rank,) for rank in ranks), ranks.index(world.rank)), [segment.alone()]


def _offer(rank: int, near: int) -> tuple[GroupFacts, segment.Segment | None]:
    wish, process = requested_transport(None), os.getpid()
    if near == 1:
        return GroupFacts(wish, process), segment.alone()
    if wish == "gloo":
        return GroupFacts(wish, process, trouble="gloo is wanted"), None
    if not (mapping.can_share_memory() and mapping.has_semaphores()):
        return GroupFacts(wish, process, trouble="a system without memory files and semaphores to share"), None
    try:
        own, file = segment.create(f"penstock-reduce-{rank}", near)
    except OSError as error:
        return GroupFacts(wish, process, trouble=str(error)), None
    return GroupFacts(wish, process, file, own.mark.hex()), own


def _facts(meeting: Meeting, mine: GroupFacts, hosts: int) -> list[GroupFacts]:
    facts = [GroupFacts(**json.loads(said)) for said in meeting.exchange("facts", json.dumps(asdict(mine)))]
    for rank, fact in zip(meeting.ranks, facts, strict=True):
        if fact.wish != facts[0].wish:
            raise InputError(
                f"the same {VARIABLE} on every rank",
                f"{facts[0].wish} on rank {meeting.ranks[0]} and {fact.wish} on rank {rank}",
                "set it alike on every rank, or leave it out",
            )
    if mine.wish == "shared" and hosts > 1:
        came = f"ranks {', '.join(map(str, meeting.ranks))} on {hosts} hosts"
        raise InputError(f"replicas on one host for {VARIABLE}=shared", came, "leave it out")
    return facts


def _opened_of(fact: GroupFacts, near: int) -> segment.Segment:
    return segment.open_at(fact.process, fact.file, bytes.fromhex(fact.mark), near)


def _require_group(world: World, ranks: tuple[int, ...]) -> None:
    if len(ranks) < 2 or list(ranks) != sorted(set(ranks)) or not 0 <= ranks[0] <= ranks[-1] < world.size:
        raise InputError(
            f"two ranks or more of 0 to {world.size - 1} to reduce over, ascending", list(ranks), "correct the group"
        )
    if world.rank not in ranks:
        raise InputError(
            f"rank {world.rank} in the group that it opens a reducer for", list(ranks), "leave it to those ranks"
        )
