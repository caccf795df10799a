"""Synchronize the ranks before they build another pipeline, and rejoin them after a failure.

A script may catch an exception and go on. The other ranks have then failed too, and unfinished collectives or messages
that nobody received must not reach the next pipeline. So the ranks wait for each other, forget the failure together,
and continue in a new process group.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic, monotonic_ns, sleep

import torch
import torch.distributed as dist

from penstock.comm.transport.gloo.queues import NOTHING
from penstock.comm.watch.status import EVERYBODY, PageField
from penstock.comm.world.buffers import CollectiveBuffers
from penstock.comm.world.rendezvous import run_interruptible
from penstock.comm.world.world import World
from penstock.errors import RankError

POLL = 0.002  # seconds between two looks at the store
STUCK = 300_000_000  # nanoseconds after which a rank that still waits for this one is considered stuck


def begin_pipeline(world: World) -> None:
    """Wait until all ranks are about to build a pipeline. Every rank has to call."""
    world.pipelines += 1
    if world.pipelines == 1:
        return
    keys = [f"pipeline/{world.pipelines}/{rank}" for rank in range(world.size)]
    world.store.set(keys[world.rank], "" if world.watch.failure is None else "failed")
    _await(world, keys)
    if any(world.store.multi_get(keys)):
        _rejoin(world)


def _rejoin(world: World) -> None:
    """Forget the failure on all ranks, and connect them in a new process group."""
    world.watch.status_page.forget()
    keys = [f"pipeline/{world.pipelines}/forgot/{rank}" for rank in range(world.size)]
    world.store.set(keys[world.rank], "")
    _await(world, keys)
    world.watch.forget_failures(world.pipelines)
    _break_connections(world)
    limit = timedelta(seconds=world.watch.timeout)
    world.group = run_interruptible(
        lambda: dist.new_group(backend="gloo", timeout=limit), lambda waited: world.watch.check(EVERYBODY, waited)
    )
    world.rows = CollectiveBuffers(world.size)
    world.rejoined()


def _await(world: World, keys: list[str]) -> None:
    """Wait until all ranks have set their keys, whatever has failed before. A rank that waits for this one in the old
    pipeline is reported as failed."""
    watch, began = world.watch, monotonic()
    entered = monotonic_ns()
    while not world.store.check(keys):
        missing = [rank for rank, key in enumerate(keys) if not world.store.check([key])]
        ended = [rank for rank in missing if watch.is_over(rank)]
        if ended or monotonic() - began > watch.timeout:
            rank = (ended or missing)[0]
            state = "has ended" if ended else f"has not come to it in {watch.timeout:.0f} s"
            raise RankError(
                f"rank {world.rank} makes another pipeline, but rank {rank} {state}: "
                "every rank has to make the same pipelines",
                rank,
            )
        watch.require_mendable()
        for rank in missing:
            if watch.failure is None and _waits_in_vain(world, rank, entered):
                watch.report_left_behind(rank)
        sleep(POLL)


def _waits_in_vain(world: World, rank: int, entered: int) -> bool:
    """Whether a rank of this host waits for this one, or for all, and has done so for STUCK since this rank came
    here."""
    page = world.watch.pages.get(rank)
    if page is None or page[PageField.PEER] not in (world.rank, EVERYBODY):
        return False
    return page[PageField.WAIT_SEEN] > max(entered, page[PageField.WAIT_SINCE]) + STUCK


def _break_connections(world: World) -> None:
    """Break the old connections, so that threads that still wait in a collective return. A receive that times out does
    that."""
    unused = torch.empty(1, dtype=torch.uint8, device="cpu")
    for rank in range(world.size):
        if rank != world.rank:
            try:
                world.group.recv([unused], rank, NOTHING).wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue
