"""Reductions within a host, through memory that its ranks share.

Each bucket goes through three phases, and a rank is in all of them at once, with buckets that follow each other:

    rank 0    write 2 | add 1 | take 0 | write 3 | add 2 | take 1 | ...
    rank 1      write 2 | add 1 | take 0 | write 3 | add 2 | ...

    write   copy to my slot what the others need of my tensors: their shares
    add     add my share of all ranks in their order, into the place of it in my slot
    take    copy the shares of the others from their slots into my tensors
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from penstock.comm.collectives.flat import Flat, add_up
from penstock.comm.collectives.interface import Traffic
from penstock.comm.collectives.rounds import Round
from penstock.comm.collectives.segment import BUCKET, SLOTS, Event, Segment
from penstock.comm.collectives.worker import Worker


class Kind(Enum):
    REDUCE = "all-reduce"
    SCATTER = "reduce-scatter"
    GATHER = "all-gather"


@dataclass(frozen=True)
class Job:
    """What a rank does with the rounds of a reduction; `digest`: what all ranks have to agree on."""

    kind: Kind
    dtype: torch.dtype
    source: Flat
    target: Flat
    rounds: list[Round]
    digest: bytes


class Unlike(Exception):
    """Not all ranks have started the same."""


class Near:
    """This rank's part. `ranks`: of the host, ascending; `segments`: theirs, in that order."""

    def __init__(self, ranks: tuple[int, ...], segments: list[Segment], worker: Worker, traffic: Traffic) -> None:
        self.ranks, self.segments, self.worker, self.traffic = ranks, segments, worker, traffic
        self.me = ranks.index(worker.rank)
        self.others = [at for at in range(len(ranks)) if at != self.me]
        self.own = segments[self.me]
        self.buckets = 0  # that this rank has written
        self._gathered = torch.empty(BUCKET, dtype=torch.uint8, device="cpu")

    def run(self, job: Job) -> None:
        """All rounds. Raises `Unlike` before any tensor is changed."""
        first, count = self.buckets, len(job.rounds)
        phases: list[Callable[[Job, Round, int], None]] = [self._write, self._add, self._take]
        for step in range(count + len(phases) - 1):
            for late, phase in enumerate(phases):
                at = step - late
                if 0 <= at < count:
                    phase(job, job.rounds[at], (first + at) % SLOTS)

    def _write(self, job: Job, one: Round, slot: int) -> None:
        if self.buckets >= SLOTS:
            self._await(Event.TAKEN)
        if one is job.rounds[0]:
            self.own.digest(slot)[: len(job.digest)] = job.digest
        for at in [self.me] if job.kind is Kind.GATHER else self.others:
            self._read(job, one, at, slot)
        self.buckets += 1
        self._tell(Event.WRITTEN)

    def _add(self, job: Job, one: Round, slot: int) -> None:
        self._await(Event.WRITTEN)
        if one is job.rounds[0] and any(s.digest(slot)[: len(job.digest)] != job.digest for s in self.segments):
            raise Unlike
        if job.kind is Kind.GATHER:
            return
        start, stop = one.shares[self.me : self.me + 2]
        terms = [segment.bucket(slot, job.dtype)[start:stop] for segment in self.segments]
        total = terms[self.me]
        terms[self.me] = self._own_share(job, one)
        add_up(terms, total)
        self.traffic.shared += len(self.others) * total.nbytes
        if job.kind is Kind.REDUCE:
            self._tell(Event.ADDED)

    def _take(self, job: Job, one: Round, slot: int) -> None:
        if job.kind is Kind.REDUCE:
            self._await(Event.ADDED)
        for at in [self.me] if job.kind is Kind.SCATTER else range(len(self.ranks)):
            address, size = self.segments[at].addresses[slot], job.dtype.itemsize
            for place, start, stop in one.within(*one.shares[at : at + 2]):
                job.target.write(start, stop, address + place * size)
                self.traffic.shared += (stop - start) * size * (at != self.me)
        self._tell(Event.TAKEN)

    def _read(self, job: Job, one: Round, at: int, slot: int) -> None:
        """The share of a rank, from my tensors into my slot."""
        for place, start, stop in one.within(*one.shares[at : at + 2]):
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

    def _tell(self, event: Event) -> None:
        for at in self.others:
            self.segments[at].semaphores[event][self.me].post()

    def _await(self, event: Event) -> None:
        for at in self.others:
            semaphore = self.own.semaphores[event][at]
            if semaphore.try_take():
                self.worker.wait(self.ranks[at], semaphore.wait)
