"""Every law a schedule must obey, all faults reported at once.

1. *Census*: every stage runs every micro-batch once: a forward, and a full backward or an input and a weight gradient,
   on the rank that holds it.
2. *Order in a slot*: forward before backward, input before weight gradient, and stages on one slot in the order of data.
3. *Transfers*: each tensor is sent once after it is made, and received once before it is used.
4. *Versions, reductions, updates*: see versions.py.
5. *Progress*: every slot reaches its end (order.py). 6. *Memory*: no slot goes over its cap.

A schedule that is not lowered yet is lowered first; the faults then point into the grid that was handed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.core import census as c
from penstock.core import match as t
from penstock.core import versions as v
from penstock.core.action import Op
from penstock.core.cost import Costs, Numbers, flat_costs
from penstock.core.faults import Fault, FaultKind, Report
from penstock.core.links import lane_ends
from penstock.core.lower import lower
from penstock.core.memory import activation_changes, levels
from penstock.core.order import Transfers, out_of_order, reach
from penstock.core.schedule import LongArray, Schedule
from penstock.core.shape import IntArray
from penstock.errors import InputError, ScheduleError

MORE = 1_000  # faults of one law that are looked at; a broken million says no more than a broken thousand


def check(
    schedule: Schedule,
    *,
    transfers: Transfers | str = Transfers.BUFFERED,
    memory: Numbers | None = None,
    costs: Costs | None = None,
) -> Report:
    """Report every fault. `memory` caps the activations of every slot, in the unit of `costs` (default: one rank's A)."""
    return Report(schedule, _faults(_Proof.of(schedule), Transfers(transfers), memory, costs))


def _faults(proof: _Proof, transfers: Transfers, memory: Numbers | None, costs: Costs | None) -> tuple[Fault, ...]:
    faults = [*proof.rows(), *proof.missing(), *proof.order(), *proof.transfers(), *proof.versions()]
    if not any(fault.kind in _BLINDING for fault in faults):
        faults += proof.progress(transfers)
        if memory is not None:
            faults += proof.memory(memory, costs or flat_costs(proof.full.shape))
    return tuple(faults)


@dataclass(frozen=True, eq=False)
class Proven:
    """A lowered schedule that passed every law, with its transfers paired. Only `prove` makes one."""

    schedule: Schedule
    pairs: t.Match


def prove(schedule: Schedule) -> Proven:
    """Lower a schedule and check it; raise ScheduleError, with all faults drawn, unless it is sound."""
    proof = _Proof.of(schedule)
    faults = _faults(proof, Transfers.BUFFERED, None, None)
    if faults:
        raise ScheduleError(str(Report(schedule, faults)), faults)
    return Proven(proof.full, proof.pairs)


# With an action or a transfer amiss, who waits for whom says nothing more.
_BLINDING = (FaultKind.STRAY, FaultKind.MISSING, FaultKind.DOUBLED, FaultKind.PARTNER)


@dataclass(frozen=True, eq=False)
class _Proof:
    """One checking: the schedule handed in, its lowered form, and the tables made of it."""

    given: Schedule
    full: Schedule
    seen: c.Census
    pairs: t.Match

    @classmethod
    def of(cls, schedule: Schedule) -> _Proof:
        full = lower(schedule)
        return cls(schedule, full, c.census(full), t.match(full))

    def fault(self, kind: FaultKind, row: int, message: str) -> Fault:
        slot = int(np.searchsorted(self.full.starts, row, side="right")) - 1
        return Fault(kind, slot, self._cell(slot, row), f"{self.word(row)}: {message}")

    def word(self, row: int) -> str:
        return str(self.full.action(row))

    def _cell(self, slot: int, row: int) -> int:
        """Place of a row in the slot's line of the grid handed in: its own, or that of the compute action it serves."""
        before = slice(int(self.full.starts[slot]), row + 1)
        op = self.full.rows.op[before]
        if self.given.lowered:
            return int(len(op) - 1 - np.count_nonzero(op[:-1] == Op.FB))
        if not np.any(self.full.is_compute()[int(self.full.starts[slot]) : int(self.full.starts[slot + 1])]):
            return -1
        done = np.count_nonzero(op <= Op.FB) - np.count_nonzero(op[:-1] == Op.FB)
        serves_next = op[-1] in (Op.RECV_F, Op.RECV_B)
        return max(0, int(done) - (0 if serves_next else 1))

    def rows(self) -> Iterator[Fault]:
        """Rows that are wrong by themselves."""
        shape = self.full.shape
        stray = {
            c.NO_STAGE: f"there is no such stage; stages are 0 to {shape.stages - 1}",
            c.NO_MICROBATCH: f"there is no such micro-batch; they are 0 to {shape.total - 1}",
            c.LONE: "overlaps nothing; an F&B needs the full backward right behind it",
        }
        for row in np.flatnonzero(self.seen.flaw)[:MORE].tolist():
            flaw, stage = int(self.seen.flaw[row]), int(self.full.rows.stage[row])
            if flaw == c.ELSEWHERE:
                where = f"stage {stage} belongs to rank {shape.placement[stage]}"
                if shape.turns and shape.stage_replicas[stage] > 1:
                    where += ", whose replicas take mini-batches in turns"
                yield self.fault(FaultKind.STRAY, row, f"{where}; move it there")
            elif flaw == c.SENT_EARLY:
                yield self.fault(FaultKind.ORDER, row, "is sent before it is made; move the send behind")
            elif flaw == c.RECEIVED_LATE:
                yield self.fault(FaultKind.ORDER, row, "is received after it was used; move the receive ahead")
            elif flaw == c.DOUBLED:
                yield self.fault(FaultKind.DOUBLED, row, "stands here a second time; drop one of the two")
            else:
                yield self.fault(FaultKind.STRAY, row, stray[flaw])

    def missing(self) -> Iterator[Fault]:
        """Actions that no slot runs."""
        op = self.full.rows.op
        split = (self.seen.backward >= 0) & (op[self.seen.backward] == Op.I)
        for letter, absent in (
            ("F", self.seen.forward < 0),
            ("B", self.seen.backward < 0),
            ("W", split & (self.seen.weight < 0)),
        ):
            for share, k in np.argwhere(absent)[:MORE].tolist():
                stage = int(np.searchsorted(self.seen.first, share, side="right")) - 1
                slot = self._slot(stage, share - int(self.seen.first[stage]), k)
                yield Fault(FaultKind.MISSING, slot, -1, f"{stage}{letter}{k} is missing; add it")
        needless = (self.seen.weight >= 0) & (self.seen.backward >= 0) & ~split
        for row in self.seen.weight[needless][:MORE].tolist():
            yield self.fault(FaultKind.DOUBLED, row, "the full backward has made this gradient; drop it, or split B into I and W")

    def _slot(self, stage: int, replica: int, k: int) -> int:
        shape = self.full.shape
        if shape.turns:
            replica = k // shape.microbatches % int(shape.stage_replicas[stage])
        return shape.slot(stage, replica)

    def order(self) -> Iterator[Fault]:
        """What must come before what on one slot."""
        seen = self.seen
        for before, after, message in (
            (seen.forward, seen.backward, "its forward comes later; run the forward first"),
            (seen.backward, seen.weight, "its input gradient comes later; run the input gradient first"),
        ):
            late = (before >= 0) & (after >= 0) & (after < before)
            for row in after[late][:MORE].tolist():
                yield self.fault(FaultKind.ORDER, row, message)
        beside = (seen.forward >= 0) & (seen.backward == seen.forward + 1) & (self.full.rows.op[seen.forward] == Op.FB)
        for row in seen.backward[beside][:MORE].tolist():
            yield self.fault(FaultKind.ORDER, row, "overlaps the forward it needs; run the forward first")
        shape = self.full.shape
        for a, b in shape.edges:
            if shape.placement[a] == shape.placement[b]:
                ours = slice(int(seen.first[a]), int(seen.first[a + 1]))
                theirs = slice(int(seen.first[b]), int(seen.first[b + 1]))
                yield from self._fed(seen.forward[ours], seen.forward[theirs], a)
                yield from self._fed(seen.backward[theirs], seen.backward[ours], b)

    def _fed(self, producer: IntArray, consumer: IntArray, stage: int) -> Iterator[Fault]:
        late = (producer >= 0) & (consumer >= 0) & (consumer < producer)
        for row in consumer[late][:MORE].tolist():
            yield self.fault(FaultKind.ORDER, row, f"stage {stage} on the same rank makes its input later; swap the two")

    def transfers(self) -> Iterator[Fault]:
        """Transfers amiss or without partner."""
        pairs = self.pairs
        for row in np.flatnonzero((pairs.flaw > 0) & (self.seen.flaw == 0))[:MORE].tolist():
            if pairs.flaw[row] == t.DOUBLED:
                yield self.fault(FaultKind.DOUBLED, row, "this transfer stands here a second time; drop one of the two")
            else:
                yield self.fault(FaultKind.STRAY, row, "no data flows between these two; drop the transfer")
        yield from self._partners()

    def _partners(self) -> Iterator[Fault]:
        shape, pairs = self.full.shape, self.pairs
        k = np.arange(shape.total)
        for lane, source, target, edge, _ in lane_ends(shape):
            a, b = shape.edges[edge]
            i, j = int(shape.slot_replica[source]), int(shape.slot_replica[target])
            due = np.ones(shape.total, dtype=bool)
            if shape.turns:
                turn = k // shape.microbatches
                due = (turn % shape.stage_replicas[a] == i) & (turn % shape.stage_replicas[b] == j)
            if not self.given.lowered:  # these transfers are made by lowering, so only a missing action takes them away
                share_a, share_b = (int(self.seen.first[s]) + (0 if shape.turns else r) for s, r in ((a, i), (b, j)))
                for table in (self.seen.forward, self.seen.backward):
                    due &= (table[share_a] >= 0) & (table[share_b] >= 0)
            for way, (letter, s, r, x, y) in enumerate((("F", a, i, b, j), ("B", b, j, a, i))):
                ours, theirs = (source, target) if way == 0 else (target, source)
                for number in np.flatnonzero(due & (pairs.sends[way, lane] < 0))[:MORE].tolist():
                    yield Fault(
                        FaultKind.PARTNER, ours, -1, f"{s}{letter}{number}>{x}{f'.{y}' if y else ''} is missing; send it"
                    )
                for number in np.flatnonzero(due & (pairs.receives[way, lane] < 0))[:MORE].tolist():
                    yield Fault(
                        FaultKind.PARTNER, theirs, -1, f"{x}{letter}{number}<{s}{f'.{r}' if r else ''} is missing; receive it"
                    )

    def versions(self) -> Iterator[Fault]:
        """Weight versions, reductions and updates."""
        flaw, wanted, newest = v.version_flaws(self.full, self.seen)
        shape = self.full.shape
        for row in np.flatnonzero(flaw)[:MORE].tolist():
            version, want, stage = int(self.full.rows.version[row]), int(wanted[row]), int(self.full.rows.stage[row])
            kind, message = {
                v.NOT_YET: (FaultKind.VERSION, f"version {version} does not exist yet; the law {shape.law.value!r} asks for {want}"),
                v.DROPPED: (FaultKind.VERSION, f"version {version} is already dropped; the law {shape.law.value!r} asks for {want}"),
                v.NOT_LAWFUL: (FaultKind.VERSION, f"version {version} breaks the law {shape.law.value!r}, which asks for {want}"),
                v.OUT_OF_ORDER: (FaultKind.UPDATE, f"makes version {version} where {want} is next"),
                v.INCOMPLETE: (FaultKind.UPDATE, "comes before the gradients it needs are complete; move it behind them"),
                v.UNREDUCED: (FaultKind.UPDATE, "the gradients were not reduced over the replicas; reduce them first"),
                v.NEEDLESS: (FaultKind.UPDATE, "the stage has one replica; there is nothing to reduce"),
                v.MIXED: (FaultKind.UPDATE, f"its gradient would go into version {want}, an earlier round's; move it behind {stage}U@{want}"),
            }[int(flaw[row])]
            yield self.fault(kind, row, message)
        if self.given.lowered or not self.seen.flaw.any():
            yield from self._updates_missing(newest)

    def _updates_missing(self, newest: np.ndarray) -> Iterator[Fault]:
        shape = self.full.shape
        for stage in range(shape.stages):
            for replica in range(int(shape.stage_replicas[stage])):
                slot, last = shape.slot(stage, replica), shape.rounds(stage)
                have = int(newest[stage, slot])
                if have < last:
                    yield Fault(
                        FaultKind.UPDATE,
                        slot,
                        -1,
                        f"stage {stage} ends with version {have} where {last} is due; {stage}U@{have + 1} is missing",
                    )

    def progress(self, kind: Transfers) -> Iterator[Fault]:
        """Slots that never reach their end, and who they wait for."""
        full = self.full
        if kind is not Transfers.BUFFERED:
            for row in out_of_order(full, self.pairs)[:MORE].tolist():
                yield self.fault(FaultKind.CHANNEL, row, "stands behind a receive whose message was sent later")
        at = reach(full, self.pairs, kind is Transfers.BLOCKING)
        for slot in range(full.shape.slots):
            row = int(at[slot])
            if row < full.starts[slot + 1]:
                yield self.fault(FaultKind.DEADLOCK, row, f"deadlock: waits for {self._awaited(row, at)}")

    def _awaited(self, row: int, at: LongArray) -> str:
        action, shape = self.full.action(row), self.full.shape
        if action.op is Op.UPDATE:
            return f"the other replicas of stage {action.stage} to reduce"
        slot = shape.slot(action.peer, action.replica)
        stuck = self.word(int(at[slot])) if at[slot] < self.full.starts[slot + 1] else "its end"
        return f"rank {int(shape.slot_rank[slot])}, which stands at {stuck}"

    def memory(self, cap: Numbers, costs: Costs) -> Iterator[Fault]:
        """The first action of every slot that goes over the cap."""
        slots = self.full.shape.slots
        caps = np.atleast_1d(np.asarray(cap, dtype=np.float64))
        if caps.shape not in ((1,), (slots,)) or np.isnan(caps).any() or (caps <= 0).any():
            raise InputError(f"a positive memory cap, or one for each of {slots} slots", caps.tolist(), "correct memory")
        caps = np.broadcast_to(caps, (slots,))
        changes = activation_changes(self.full, costs).values()
        begun, _ = levels(self.full, (sum(b for b, _ in changes), sum(e for _, e in changes)))  # type: ignore[arg-type]
        for slot in range(slots):
            first, last = int(self.full.starts[slot]), int(self.full.starts[slot + 1])
            over = np.flatnonzero(begun[first:last] > caps[slot] * (1 + 1e-9))
            if len(over):
                most = float(begun[first:last].max())
                yield self.fault(
                    FaultKind.MEMORY, first + int(over[0]), f"memory goes over the cap of {caps[slot]:g} (peak {most:g})"
                )
