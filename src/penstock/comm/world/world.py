"""The ranks of a run, as one of them sees them: who is where, and small messages between all.

    world = join()
    if world is not None:
        world.gather(b"mine")   # everybody's, in the order of the ranks

`Alone` is a world of one process. `Votes` asks all ranks before every update whether all is well, so it must cost next
to nothing: on one host each rank writes its answer on its status page and reads the others', so nothing is sent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, Work

from penstock.comm.watch.exit import install
from penstock.comm.watch.process import follow_parent
from penstock.comm.watch.status import EVERYBODY, GATHER, Page, Slot
from penstock.comm.watch.watch import Watch
from penstock.comm.world.buffers import HEAD, SHORT, Rows, data_of, length
from penstock.comm.world.host import LOOPBACK, identity, interface_to
from penstock.comm.world.rendezvous import Announcement, Place, connect, meet, patiently, place, start_timeout
from penstock.errors import RankError

NAP = 20e-6  # seconds between two looks at a rank that has not answered yet
ASK = 0.05  # seconds between two questions whether it still can


class Votes:
    """The questions of one rank. All ranks ask in the same order."""

    def __init__(self, watch: Watch, size: int, gather: Callable[[bytes], list[bytes]]) -> None:
        self.watch, self.gather = watch, gather
        self.near = len(watch.pages) == size - 1
        self.count = 0

    def all_well(self, well: bool) -> bool:
        """Whether all ranks say so. None of them goes on before all have said it."""
        if not self.near:
            return all(part == b"y" for part in self.gather(b"y" if well else b"n"))
        self.count += 1
        # Two places in turn: who is quick may answer the next question before all have read this one's answer.
        slot = Slot.VOTES + self.count % 2
        self.watch.board.page[slot] = self.count << 1 | well
        return all([well, *(self._answer(rank, page, slot) for rank, page in self.watch.pages.items())])

    def _answer(self, rank: int, page: Page, slot: int) -> bool:
        asked = 0.0
        began = monotonic()
        while page.page[slot] >> 1 != self.count:
            if monotonic() - asked > ASK:
                asked = monotonic()
                self.watch.check(rank, asked - began)
            sleep(NAP)
        return bool(page.page[slot] & 1)


TICK = timedelta(seconds=0.2)


@dataclass
class World:
    """`hosts`: by rank; equal where two ranks can share memory. `group`: gloo, of all ranks."""

    rank: int
    size: int
    hosts: tuple[str, ...]
    store: Store
    group: dist.ProcessGroup
    watch: Watch
    rows: Rows
    pipelines: int = 0  # that this rank has begun to make

    def __post_init__(self) -> None:
        self.renewed()

    def renewed(self) -> None:
        """The ranks have joined, at first or anew."""
        self.votes = Votes(self.watch, self.size, self.gather)

    def all_well(self, well: bool) -> bool:
        """Whether all ranks say that all is well. Every rank has to call, and none goes on before all have."""
        return self.votes.all_well(well)

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, in the order of the ranks. Every rank has to call; the sizes may differ."""
        rows = self._all_gather(data, SHORT)
        sizes = [length(row) for row in rows]
        if max(sizes) > SHORT - HEAD:
            rows = self._all_gather(data, max(sizes) + HEAD)
        return [data_of(row, size) for row, size in zip(rows, sizes, strict=True)]

    def broadcast(self, data: bytes | None, source: int) -> bytes:
        """The bytes of one rank, on every rank. Every rank has to call."""
        if self.rank == source and data is None:
            raise TypeError("the source of a broadcast has to give its bytes")
        mine = data if data is not None and self.rank == source else b""
        row = self._broadcast(mine, SHORT, source)
        size = length(row)
        if size > SHORT - HEAD:
            row = self._broadcast(mine, size + HEAD, source)
        return data_of(row, size)

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.gather(b"")

    def _all_gather(self, data: bytes, size: int) -> list[torch.Tensor]:
        row, rows = self.rows.packed(data, size)
        self._finish(dist.all_gather(rows, row, group=self.group, async_op=True), GATHER)
        return rows

    def _broadcast(self, data: bytes, size: int, source: int) -> torch.Tensor:
        row, _ = self.rows.packed(data, size)
        self._finish(dist.broadcast(row, group=self.group, async_op=True, group_src=source), 1 + source)
        return row

    def _finish(self, work: Work | None, kind: int) -> None:
        """Wait in a way in which the failure of another rank is noticed."""
        assert work is not None
        self.watch.board.meet(kind)
        began = monotonic()
        while True:
            try:
                work.wait(TICK)
                return
            except RuntimeError as error:
                if work.is_completed() and not _timed_out(error):
                    raise self.watch.lost(EVERYBODY, error) from None
            self.watch.check(EVERYBODY, monotonic() - began)


_world: World | None = None


def join(timeout: float | None = None) -> World | None:
    """Meet the other ranks that a launcher has started; None where this process is alone.

    `timeout`: seconds in which all of them have to appear; else those of the environment's PENSTOCK_START_TIMEOUT, or
    60. A process joins once; later calls return the same World.
    """
    global _world
    if _world is None:
        _world = _join(monotonic() + (start_timeout(os.environ) if timeout is None else timeout))
    return _world


def _join(until: float) -> World | None:
    mine = dist.is_available() and dist.is_initialized()
    if mine and dist.get_world_size() == 1:
        return None
    here = place(os.environ)
    if here is None and not mine:
        return None
    agent = here is not None and here.agent
    parent = follow_parent(launched=agent)
    if mine:
        rank, size = dist.get_rank(), dist.get_world_size()
        store: Store = PrefixStore("penstock", dist.distributed_c10d._get_default_store())
    else:
        assert here is not None
        rank, size, store = here.rank, here.size, connect(here, until)
    watch = Watch(rank, size)
    me = Announcement(size, identity(), os.getpid(), watch.board.file.path)
    said = meet(store, rank, me, until, lambda: watch.board.gone)
    hosts = tuple(one.host for one in said)
    near = {r: (one.pid, one.board) for r, one in enumerate(said) if one.host == hosts[rank] and r != rank}
    watch.start(near, store.clone(), agent, parent)  # type: ignore[attr-defined]
    install(watch, _part)
    _choose_interface(hosts, here)
    group = _make_group(store, rank, size, mine, _within(watch, until))
    world = World(rank, size, hosts, store, group, watch, Rows(size))
    world.barrier()
    watch.running()
    return world


def _within(watch: Watch, until: float) -> Callable[[float], None]:
    def check(waited: float) -> None:
        watch.check(EVERYBODY, 0.0)
        if monotonic() > until:
            raise RankError(f"expected all ranks to connect at the start, but rank {watch.rank} still waits for some")

    return check


def _choose_interface(hosts: tuple[str, ...], here: Place | None) -> None:
    """Loopback on one host; else the interface that leads to the address that the user gave, unless one is named."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if len(set(hosts)) == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    elif here is not None:
        name = interface_to(here.address, here.port)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _make_group(store: Store, rank: int, size: int, mine: bool, check: Callable[[float], None]) -> dist.ProcessGroup:
    def make() -> dist.ProcessGroup:
        if mine:
            group: dist.ProcessGroup = dist.new_group(backend="gloo")
            return group
        hook = sys.excepthook
        dist.init_process_group("gloo", store=PrefixStore("group", store), rank=rank, world_size=size)
        sys.excepthook = hook  # torch's holds a traceback back until the other ranks have spoken
        group = dist.distributed_c10d._get_default_group()
        return group

    return patiently(make, check)


def _part() -> None:
    """Close the connections in order: left to the end of the process, their threads may outlive what they use."""
    global _world
    if _world is not None:
        _world.rows.let_go()
        group, _world = _world.group, None
        if dist.is_initialized():
            dist.destroy_process_group(group)


def _timed_out(error: RuntimeError) -> bool:
    return "Operation timed out" in str(error)


class Alone:
    """All stages run here."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def all_well(self, well: bool) -> bool:
        return well

    def broadcast(self, data: bytes | None, source: int) -> bytes:
        assert data is not None
        return data
