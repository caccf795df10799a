"""The ranks of a run, as one of them sees them: which rank is on which host, and collectives of a few bytes.

    world = join()
    if world is not None:
        world.gather(b"data")   # the bytes of every rank, in the order of the ranks

`Alone` is a world of one process. `Votes` asks all ranks before every update whether all is well, so it must cost next
to nothing: on one host each rank writes its answer on its status page and reads those of the others, and nothing is
sent.
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
from penstock.comm.watch.status import EVERYBODY, GATHER, PageField, StatusPageReader
from penstock.comm.watch.watch import Watch
from penstock.comm.world.buffers import HEAD, SHORT, CollectiveBuffers, data_of, length
from penstock.comm.world.host import LOOPBACK, identity, interface_to
from penstock.comm.world.rendezvous import (
    Announcement,
    LaunchEnvironment,
    announce_and_wait,
    connect_store,
    launch_environment,
    run_interruptible,
    start_timeout,
)
from penstock.errors import RankError

NAP = 20e-6  # seconds between two reads of the page of a rank that has not answered yet
ASK = 0.05  # seconds between two checks that the rank has not failed


class Votes:
    """Votes of all ranks on yes-or-no questions. All ranks ask the same questions in the same order."""

    def __init__(self, watch: Watch, size: int, gather: Callable[[bytes], list[bytes]]) -> None:
        self.watch, self.gather = watch, gather
        self.near = len(watch.pages) == size - 1
        self.count = 0

    def all_well(self, well: bool) -> bool:
        """Return whether all ranks vote yes. No rank returns before all have voted."""
        if not self.near:
            return all(part == b"y" for part in self.gather(b"y" if well else b"n"))
        self.count += 1
        # Two fields alternate: a fast rank may answer the next question before all have read its answer to this one.
        field = PageField.VOTES + self.count % 2
        self.watch.status_page.fields[field] = self.count << 1 | well
        return all([well, *(self._answer(rank, page, field) for rank, page in self.watch.pages.items())])

    def _answer(self, rank: int, page: StatusPageReader, field: int) -> bool:
        checked = 0.0
        began = monotonic()
        while page.fields[field] >> 1 != self.count:
            if monotonic() - checked > ASK:
                checked = monotonic()
                self.watch.check(rank, checked - began)
            sleep(NAP)
        return bool(page.fields[field] & 1)


TICK = timedelta(seconds=0.2)


@dataclass
class World:
    """The world of ranks. `hosts`: by rank, equal for ranks that can share memory. `group`: the gloo process group of
    all ranks."""

    rank: int
    size: int
    hosts: tuple[str, ...]
    store: Store
    group: dist.ProcessGroup
    watch: Watch
    rows: CollectiveBuffers
    pipelines: int = 0  # that this rank has begun to build

    def __post_init__(self) -> None:
        self.rejoined()

    def rejoined(self) -> None:
        """Reset the votes after the ranks have joined or rejoined."""
        self.votes = Votes(self.watch, self.size, self.gather)

    def all_well(self, well: bool) -> bool:
        """Return whether all ranks say that all is well. Every rank has to call; none returns before all have
        called."""
        return self.votes.all_well(well)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in the order of the ranks. Every rank has to call; the sizes may differ."""
        rows = self._all_gather(data, SHORT)
        sizes = [length(row) for row in rows]
        if max(sizes) > SHORT - HEAD:
            rows = self._all_gather(data, max(sizes) + HEAD)
        return [data_of(row, size) for row, size in zip(rows, sizes, strict=True)]

    def broadcast(self, data: bytes | None, source: int) -> bytes:
        """Return the bytes of one rank, on every rank. Every rank has to call."""
        if self.rank == source and data is None:
            raise TypeError("the source of a broadcast has to give its bytes")
        own = data if data is not None and self.rank == source else b""
        row = self._broadcast(own, SHORT, source)
        size = length(row)
        if size > SHORT - HEAD:
            row = self._broadcast(own, size + HEAD, source)
        return data_of(row, size)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.gather(b"")

    def _all_gather(self, data: bytes, size: int) -> list[torch.Tensor]:
        row, rows = self.rows.pack(data, size)
        self._finish(dist.all_gather(rows, row, group=self.group, async_op=True), GATHER)
        return rows

    def _broadcast(self, data: bytes, size: int, source: int) -> torch.Tensor:
        row, _ = self.rows.pack(data, size)
        self._finish(dist.broadcast(row, group=self.group, async_op=True, group_src=source), 1 + source)
        return row

    def _finish(self, work: Work | None, kind: int) -> None:
        """Wait for a collective, and raise if another rank fails in the meantime."""
        assert work is not None
        self.watch.status_page.begin_collective(kind)
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
    """Return the world of ranks that a launcher has started, or None for a single process.

    `timeout`: seconds within which all ranks have to start; default is the environment's PENSTOCK_START_TIMEOUT, or 60.
    A process joins once; later calls return the same World.
    """
    global _world
    if _world is None:
        _world = _join(monotonic() + (start_timeout(os.environ) if timeout is None else timeout))
    return _world


def _join(until: float) -> World | None:
    initialized = dist.is_available() and dist.is_initialized()
    if initialized and dist.get_world_size() == 1:
        return None
    here = launch_environment(os.environ)
    if here is None and not initialized:
        return None
    agent = here is not None and here.agent
    parent = follow_parent(launched=agent)
    if initialized:
        rank, size = dist.get_rank(), dist.get_world_size()
        store: Store = PrefixStore("penstock", dist.distributed_c10d._get_default_store())
    else:
        assert here is not None
        rank, size, store = here.rank, here.size, connect_store(here, until)
    watch = Watch(rank, size)
    announcement = Announcement(size, identity(), os.getpid(), watch.status_page.file.path)
    announcements = announce_and_wait(store, rank, announcement, until, lambda: watch.status_page.gone)
    hosts = tuple(one.host for one in announcements)
    near = {
        r: (one.pid, one.status_page) for r, one in enumerate(announcements) if one.host == hosts[rank] and r != rank
    }
    watch.start(near, store.clone(), agent, parent)  # type: ignore[attr-defined]
    install(watch, _disconnect)
    _choose_interface(hosts, here)
    group = _make_group(store, rank, size, initialized, _start_check(watch, until))
    world = World(rank, size, hosts, store, group, watch, CollectiveBuffers(size))
    world.barrier()
    watch.running()
    return world


def _start_check(watch: Watch, until: float) -> Callable[[float], None]:
    """Return a function that raises when a rank has failed or the start takes too long."""

    def check(waited: float) -> None:
        watch.check(EVERYBODY, 0.0)
        if monotonic() > until:
            raise RankError(f"expected all ranks to connect at the start, but rank {watch.rank} still waits for some")

    return check


def _choose_interface(hosts: tuple[str, ...], here: LaunchEnvironment | None) -> None:
    """Choose gloo's interface, unless the environment names one: loopback on one host, else the one that leads to
    MASTER_ADDR."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if len(set(hosts)) == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    elif here is not None:
        name = interface_to(here.address, here.port)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _make_group(
    store: Store, rank: int, size: int, initialized: bool, check: Callable[[float], None]
) -> dist.ProcessGroup:
    def make() -> dist.ProcessGroup:
        if initialized:
            group: dist.ProcessGroup = dist.new_group(backend="gloo")
            return group
        hook = sys.excepthook
        dist.init_process_group("gloo", store=PrefixStore("group", store), rank=rank, world_size=size)
        sys.excepthook = hook  # torch's hook delays a traceback until the other ranks have printed theirs
        group = dist.distributed_c10d._get_default_group()
        return group

    return run_interruptible(make, check)


def _disconnect() -> None:
    """Close the connections in order. At the end of the process, gloo's threads could outlive the objects that they
    use."""
    global _world
    if _world is not None:
        _world.rows.wait_released()
        group, _world = _world.group, None
        if dist.is_initialized():
            dist.destroy_process_group(group)


def _timed_out(error: RuntimeError) -> bool:
    return "Operation timed out" in str(error)


class Alone:
    """A world of one process, which runs all stages."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def all_well(self, well: bool) -> bool:
        return well

    def broadcast(self, data: bytes | None, source: int) -> bytes:
        assert data is not None
        return data
