"""The ranks meet before they make another pipeline, and join anew where one has failed before.

An exception that a user's script has caught is over for its rank; but others hear of it, and what was under way between
them, half a collective or a message that nobody took, must never get into what comes next. So the ranks wait for each
other, forget the failure together, and go on in a process group of their own.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic, monotonic_ns, sleep

import torch
import torch.distributed as dist

from penstock.comm.transport.gloo.queues import NOTHING
from penstock.comm.watch.status import EVERYBODY, Slot
from penstock.comm.world.buffers import Rows
from penstock.comm.world.rendezvous import patiently
from penstock.comm.world.world import World
from penstock.errors import RankError

PIECE = 0.002  # seconds between two questions
STUCK = 300_000_000  # nanoseconds after which a rank that waits for one that is here waits for nothing


def begin_pipeline(world: World) -> None:
    """Called by every rank before it makes a pipeline: wait until all do."""
    world.pipelines += 1
    if world.pipelines == 1:
        return
    keys = [f"pipeline/{world.pipelines}/{rank}" for rank in range(world.size)]
    world.store.set(keys[world.rank], "" if world.watch.failure is None else "failed")
    _await(world, keys)
    if any(world.store.multi_get(keys)):
        _renew(world)


def _renew(world: World) -> None:
    world.watch.board.forget()
    keys = [f"pipeline/{world.pipelines}/forgot/{rank}" for rank in range(world.size)]
    world.store.set(keys[world.rank], "")
    _await(world, keys)
    world.watch.renew(world.pipelines)
    _cut(world)
    limit = timedelta(seconds=world.watch.timeout)
    world.group = patiently(
        lambda: dist.new_group(backend="gloo", timeout=limit), lambda waited: world.watch.check(EVERYBODY, waited)
    )
    world.rows = Rows(world.size)
    world.renewed()


def _await(world: World, keys: list[str]) -> None:
    """Until all ranks have come, whatever has failed before. One that waits for this rank elsewhere is told that it
    waits in vain."""
    watch, began = world.watch, monotonic()
    entered = monotonic_ns()
    while not world.store.check(keys):
        missing = [rank for rank, key in enumerate(keys) if not world.store.check([key])]
        ended = [rank for rank in missing if watch.is_over(rank)]
        if ended or monotonic() - began > watch.timeout:
            rank = (ended or missing)[0]
            what = "has ended" if ended else f"has not come to it in {watch.timeout:.0f} s"
            raise RankError(
                f"rank {world.rank} makes another pipeline, but rank {rank} {what}: "
                "every rank has to make the same pipelines",
                rank,
            )
        watch.require_hope()
        for rank in missing:
            if watch.failure is None and _waits_in_vain(world, rank, entered):
                watch.left_behind(rank)
        sleep(PIECE)


def _waits_in_vain(world: World, rank: int, entered: int) -> bool:
    """Whether a rank of this host waits for this one, or for all, and has done so for long since this one came here."""
    page = world.watch.pages.get(rank)
    if page is None or page[Slot.PEER] not in (world.rank, EVERYBODY):
        return False
    return page[Slot.WAIT_SEEN] > max(entered, page[Slot.WAIT_SINCE]) + STUCK


def _cut(world: World) -> None:
    """Break the old connections, which a wait that runs out of time does: threads that wait there for a collective to
    end come back."""
    nowhere = torch.empty(1, dtype=torch.uint8, device="cpu")
    for rank in range(world.size):
        if rank != world.rank:
            try:
                world.group.recv([nowhere], rank, NOTHING).wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue
