"""The rounds of a reduction, through memory that the ranks of a host share.

Each bucket goes through three phases, and a rank is in all of them at once, with buckets that follow each other:

    rank 0    write 2 | add 1 | take 0 | write 3 | add 2 | take 1 | ...
    rank 1      write 2 | add 1 | take 0 | write 3 | add 2 | ...

    write   copy to my slot what the others need of my tensors: their shares
    add     add my share of all ranks in their order, into the place of it in my slot
    take    copy the shares of the others from their slots into my tensors

On several hosts the first rank of each has one more phase, `cross`, before it takes: it puts all shares into its slot,
sums them with the other hosts', and there the ranks of its host take all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from penstock.comm.collectives.far import Far
from penstock.comm.collectives.flat import add_up, copy
from penstock.comm.collectives.interface import Traffic
from penstock.comm.collectives.job import Job, Kind, Unlike
from penstock.comm.collectives.rounds import Group, Round
from penstock.comm.collectives.segment import BUCKET, SLOTS, Event, Segment
from penstock.comm.collectives.worker import Worker

YIELD = 100e-6  # seconds of looking before a thread sleeps
LEADER = 0  # the first rank of a host


class Near:
    """This rank's part. `ranks`: of its host, ascending; numbers of ranks in here count among these."""

    def __init__(
        self, group: Group, segments: list[Segment], worker: Worker, traffic: Traffic, far: Far | None = None
    ) -> None:
        """`segments`: of the ranks of this host; `far`: of the first of them, where there are other hosts."""
        self.group, self.ranks = group, group.near
        self.segments, self.worker, self.traffic = segments, worker, traffic
        self.me = self.ranks.index(worker.rank)
        self.own = segments[self.me]
        self._others = [at for at in range(len(self.ranks)) if at != self.me]
        self._far, self._several = far, len(group.hosts) > 1
        self._first = group.order.index(self.ranks[0])  # of this host's parts
        self._buckets = 0  # that this rank has written
        self._gathered = torch.empty(BUCKET, dtype=torch.uint8, device="cpu")

    def run(self, job: Job) -> None:
        """All rounds. Raises `Unlike` before any tensor is changed."""
        first, count = self._buckets, len(job.rounds)
        phases: list[Callable[[Job, Round, int], None]] = [self._write, self._add, self._take]
        if self._several:
            self._agree(job)
            phases.insert(2, self._cross)
        for step in range(count + len(phases) - 1):
            for late, phase in enumerate(phases):
                at = step - late
                if 0 <= at < count:
                    phase(job, job.rounds[at], (first + at) % SLOTS)

    def close(self) -> None:
        if self._far is not None:
            self._far.close()

    def _agree(self, job: Job) -> None:
        """All hosts, before they exchange anything."""
        size = len(job.digest)
        self.own.digest(0)[:size] = job.digest
        if self._far is None:
            self._tell(Event.WRITTEN, [LEADER])
            self._await(Event.SPREAD, [LEADER])
        else:
            self._await(Event.WRITTEN, self._others)
            near = all(segment.digest(0)[:size] == job.digest for segment in self.segments)
            self.own.digest(0)[size] = self._far.agree(job.digest if near else bytes(size)) and near
            self._tell(Event.SPREAD, self._others)
        if not self.segments[LEADER].digest(0)[size]:
            raise Unlike

    def _write(self, job: Job, one: Round, slot: int) -> None:
        if self._buckets >= SLOTS:
            self._await(Event.TAKEN, self._others)
        if one is job.rounds[0] and not self._several:
            self.own.digest(slot)[: len(job.digest)] = job.digest
        places = [self._part(one)] if job.kind is Kind.GATHER else [one.shares[at : at + 2] for at in self._others]
        for start, stop in places:
            self._read(job, one, start, stop, slot)
        self._buckets += 1
        self._tell(Event.WRITTEN, self._others)

    def _add(self, job: Job, one: Round, slot: int) -> None:
        self._await(Event.WRITTEN, self._others)
        if one is job.rounds[0] and not self._several:
            self._require_alike(job, slot)
        if job.kind is Kind.GATHER:
            return
        start, stop = one.shares[self.me : self.me + 2]
        if self._others:
            terms = [segment.bucket(slot, job.dtype)[start:stop] for segment in self.segments]
            total = terms[self.me]
            terms[self.me] = self._own_share(job, one)
            add_up(terms, total)
            self.traffic.shared += len(self._others) * total.nbytes
        else:
            self._read(job, one, start, stop, slot)
        if self._several:
            self._tell(Event.ADDED, [LEADER] if self._far is None else [])
        elif job.kind is Kind.REDUCE:
            self._tell(Event.ADDED, self._others)

    def _require_alike(self, job: Job, slot: int) -> None:
        if any(segment.digest(slot)[: len(job.digest)] != job.digest for segment in self.segments):
            raise Unlike

    def _cross(self, job: Job, one: Round, slot: int) -> None:
        """The first rank of a host puts its bucket together, and sums it with those of the other hosts."""
        if self._far is None:
            return
        if job.kind is not Kind.GATHER:
            self._await(Event.ADDED, self._others)
        for at in self._others:
            start, stop = self._part(one, at) if job.kind is Kind.GATHER else one.shares[at : at + 2]
            size = job.dtype.itemsize
            copy(
                self.own.addresses[slot] + start * size, self.segments[at].addresses[slot] + start * size,
                (stop - start) * size,
            )  # fmt: skip
            self.traffic.shared += (stop - start) * size
        bucket = self.own.bucket(slot, job.dtype)[: one.size]
        if job.kind is not Kind.GATHER:
            self._far.scatter(bucket, one.regions)
        if job.kind is not Kind.SCATTER:
            self._far.gather(bucket, one.regions)
        self._tell(Event.SPREAD, self._others)

    def _take(self, job: Job, one: Round, slot: int) -> None:
        part = self._part(one) if job.kind is Kind.SCATTER else (0, one.size)
        if self._several:
            if self._far is None:
                self._await(Event.SPREAD, [LEADER])
            places = [(LEADER, *part)]
        elif job.kind is Kind.SCATTER:
            places = [(self.me, *part)]
        else:
            if job.kind is Kind.REDUCE:
                self._await(Event.ADDED, self._others)
            places = [(at, one.shares[at], one.shares[at + 1]) for at in range(len(self.ranks))]
        for at, first, last in places:
            address, size = self.segments[at].addresses[slot], job.dtype.itemsize
            for place, start, stop in one.within(first, last):
                job.target.write(start, stop, address + place * size)
                self.traffic.shared += (stop - start) * size * (at != self.me)
        self._tell(Event.TAKEN, self._others)

    def _part(self, one: Round, at: int | None = None) -> tuple[int, int]:
        """Where in the bucket the part of a rank of this host is; this rank's without a number."""
        number = self._first + (self.me if at is None else at)
        return one.parts[number], one.parts[number + 1]

    def _read(self, job: Job, one: Round, first: int, last: int, slot: int) -> None:
        """Copy what belongs there in the bucket, from my tensors into my slot."""
        for place, start, stop in one.within(first, last):
            job.source.read(start, stop, self.own.addresses[slot] + place * job.dtype.itemsize)

    def _own_share(self, job: Job, one: Round) -> torch.Tensor:
        """Where my share is spread over several tensors, it is gathered first."""
        start, stop = one.shares[self.me : self.me + 2]
        pieces = list(one.within(start, stop))
        if len(pieces) == 1 and (view := job.source.view(*pieces[0][1:])) is not None:
            return view
        gathered = self._gathered.view(job.dtype)[: stop - start]
        for place, low, high in pieces:
            job.source.read(low, high, gathered.data_ptr() + (place - start) * job.dtype.itemsize)
        return gathered

    def _tell(self, event: Event, whom: list[int]) -> None:
        for at in whom:
            self.segments[at].semaphores[event][self.me].post()

    def _await(self, event: Event, whom: list[int]) -> None:
        for at in whom:
            semaphore = self.own.semaphores[event][at]
            if semaphore.try_take() and not _soon(semaphore.try_take):
                self.worker.wait((self.ranks[at],), semaphore.wait)


def _soon(try_take: Callable[[], int]) -> bool:
    """Whether there is one within a moment, in which others may have the core: to be woken takes longer."""
    until = time.perf_counter() + YIELD
    while time.perf_counter() < until:
        os.sched_yield()
        if not try_take():
            return True
    return False
