"""Training without a flush: the rows of a loop, pass by pass, on the stages of one process.

`InlineStream` runs all slots in dependency order; `WorkerStream` one slot in its own process. Both act in the same way,
so they give the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow, LoweredLoop
from penstock.engine.acting import Acting
from penstock.engine.clock import RunClock
from penstock.engine.inline import forward_all
from penstock.engine.lanes import Lanes
from penstock.engine.mailing import Mailing
from penstock.engine.watch.board import Slot, place
from penstock.engine.watch.watch import Watch
from penstock.engine.weights import Weights
from penstock.engine.worker import running
from penstock.model.loss import Loss, Total
from penstock.model.stage import Job, Stage
from penstock.model.walk import watching


class Updates(Protocol):
    """Who turns gradients into new versions."""

    def before(self, stage: Stage, job: Job, version: int) -> None:
        """A forward is about to run."""

    def gather(self, stage: Stage, job: Job) -> None:
        """Gradients are about to be made."""

    def close(self, stage: Stage, job: Job) -> None:
        """The last gradient of a round is there; nothing of that backward has been sent on yet."""

    def update(self, stage: Stage, version: int) -> None:
        """The schedule wants a version made."""


class Streaming:
    """Acts on rows; a subclass says in which order, and what becomes of transfers."""

    slots: tuple[int, ...]
    clocks: Sequence[RunClock] = ()  # one a slot, or none

    def __init__(self, endless: LoweredLoop, stages: list[Stage], weights: Weights, updates: Updates) -> None:
        self.endless, self.weights, self.updates = endless, weights, updates
        per_pass = endless.loop.period * endless.shape.microbatches
        split: set[tuple[int, int]] = set()  # stages, and micro-batches of a pass
        for rows in (*endless.loop.fill, *endless.loop.body):
            mine = rows.op == Op.I
            split.update(zip(rows.stage[mine].tolist(), (rows.microbatch[mine] % per_pass).tolist(), strict=True))
        self.acting = Acting(stages, lambda stage, microbatch: (stage, microbatch % per_pass) in split)
        self.gathered: Counter[tuple[int, int]] = Counter()  # gradients of a round, by stage and mini-batch

    def begin(self) -> None:
        """A run begins, with no micro-batch in flight."""
        self.acting.begin([])
        self.gathered.clear()
        self.weights.begin()
        for clock in self.clocks:
            clock.forget()

    def take(self, jobs: list[Job]) -> None:
        """The micro-batches of a mini-batch."""
        for job in jobs:
            self.acting.jobs[job.number] = job

    def forget(self, jobs: list[Job]) -> None:
        """They are done with, on all stages here."""
        for job in jobs:
            del self.acting.jobs[job.number]
            self.acting.made.pop(job.number, None)

    def run(self, rows: list[list[ActionRow]]) -> None:
        """Some rows of every slot here."""
        raise NotImplementedError

    def forward(self, jobs: list[Job]) -> list[Any]:
        """Forwards alone, outside of a run."""
        raise NotImplementedError

    def drop(self) -> None:
        """Forget what an interrupted run has left behind."""
        self.acting.drop()
        self.weights.begin()

    def close(self) -> None:
        """Let go of what others wait for."""

    def took_in(self, fed: int) -> None:
        """So many mini-batches since the run began."""

    @contextmanager
    def leaving(self, fed: int) -> Iterator[None]:
        """Around what finds out whether all ranks end the run behind that many mini-batches."""
        yield

    def compute(self, row: ActionRow) -> None:
        job, stage = self.acting.jobs[row.microbatch], self.acting.stages[row.stage]
        if row.op in (Op.F, Op.FB):
            self.updates.before(stage, job, row.version)
        else:
            self.updates.gather(stage, job)
        with self.weights.at(row.op, row.stage, row.microbatch, row.version):
            self.acting.act(row.op, row.stage, row.microbatch)
        if row.op is Op.F and stage.last and job.rows:
            self._note_loss(job)
        elif row.op in (Op.B, Op.W):
            place = (row.stage, row.microbatch // self.endless.shape.microbatches)
            self.gathered[place] += 1
            if self.gathered[place] == self.endless.shape.microbatches:
                del self.gathered[place]
                self.updates.close(stage, job)

    def update(self, row: ActionRow) -> None:
        self.updates.update(self.acting.stages[row.stage], row.version)

    def _note_loss(self, job: Job) -> None:
        loss = self.acting.made[job.number]
        assert isinstance(loss, Loss)
        job.words.total, job.words.weight = loss.total, float(loss.weight)
        if job.words.weight:  # a micro-batch may have nothing to score; the mini-batch is looked at when it is over
            Total(job.words.total, job.words.weight).require_usable()


class InlineStream(Streaming):
    """All slots in this process. A slot goes on until it wants what is not made yet. `clocks`: one a slot, or none."""

    def __init__(
        self,
        endless: LoweredLoop,
        stages: list[Stage],
        weights: Weights,
        updates: Updates,
        clocks: Sequence[RunClock] = (),
    ) -> None:
        super().__init__(endless, stages, weights, updates)
        self.clocks = clocks
        self.slots = tuple(range(endless.shape.slots))
        self.rows: list[list[ActionRow]] = []
        self.at: list[int] = []  # by slot, the row that comes next
        self.slot = 0  # that runs
        self.sent: set[tuple[int, int, int]] = set()  # stages from and to, and micro-batch

    def run(self, rows: list[list[ActionRow]]) -> None:
        self.rows, self.at = rows, [0] * len(rows)
        with watching():
            moved = True
            while moved:
                moved = False
                for self.slot, mine in enumerate(rows):
                    clock = self.clocks[self.slot] if self.clocks else None
                    if clock is not None:
                        clock.begin()
                    while self.at[self.slot] < len(mine) and self._did(mine[self.at[self.slot]]):
                        self.at[self.slot] += 1
                        moved = True
                        if clock is not None:
                            clock.tick()

    def unfinished(self) -> tuple[int, list[list[ActionRow]]]:
        """After a failure: the mini-batch that failed, and what is left of the rows of every slot."""
        failed = self.rows[self.slot][self.at[self.slot]]
        return self.mini_batch(failed), [mine[at:] for mine, at in zip(self.rows, self.at, strict=True)]

    def mini_batch(self, row: ActionRow) -> int:
        """Whose row it is; an update makes the version behind its mini-batch's."""
        return row.version - 1 if row.op > Op.RECV_B else row.microbatch // self.endless.shape.microbatches

    def _did(self, row: ActionRow) -> bool:
        if row.op <= Op.FB:
            self.compute(row)
        elif row.op in (Op.SEND_F, Op.SEND_B):
            self.sent.add((row.stage, row.peer, row.microbatch))
        elif row.op in (Op.RECV_F, Op.RECV_B):
            if (row.peer, row.stage, row.microbatch) not in self.sent:
                return False
            self.sent.remove((row.peer, row.stage, row.microbatch))
        else:
            self.update(row)
        return True

    def begin(self) -> None:
        super().begin()
        self.sent.clear()

    def forward(self, jobs: list[Job]) -> list[Any]:
        return forward_all(self.acting, jobs)


class WorkerStream(Streaming):
    """One slot in its own process, with real transfers."""

    def __init__(
        self,
        endless: LoweredLoop,
        rank: int,
        stages: list[Stage],
        weights: Weights,
        updates: Updates,
        lanes: Lanes,
        watch: Watch,
        clock: RunClock | None = None,
    ) -> None:
        super().__init__(endless, stages, weights, updates)
        self.slots, self.watch, self.clock = (rank,), watch, clock
        self.clocks = () if clock is None else (clock,)
        self.lanes = lanes
        self.mailing = Mailing(self.acting, lanes, stages[0].settings.device, news=True)

    def begin(self) -> None:
        super().begin()
        self.mailing.next_run()

    def run(self, rows: list[list[ActionRow]]) -> None:
        (mine,) = rows
        doing, clock = self.watch.doing, self.clock
        with running(self.watch):
            if clock is not None:
                clock.begin()
            for row in mine:
                doing(row)
                self._act(row)
                if clock is not None:
                    clock.tick()

    def _act(self, row: ActionRow) -> None:
        if row.op <= Op.FB:
            self.compute(row)
        elif row.op in (Op.SEND_F, Op.SEND_B):
            self.mailing.send(row.stage, row.microbatch, row.peer)
        elif row.op in (Op.RECV_F, Op.RECV_B):
            self.mailing.receive(row.stage, row.microbatch, row.peer)
        else:
            self.update(row)

    def forward(self, jobs: list[Job]) -> list[Any]:
        self.mailing.next_run()
        self.acting.begin(jobs)
        with running(self.watch), self.acting.watched():
            return self.mailing.forward(jobs, self.acting.turn)

    def close(self) -> None:
        self.lanes.close()

    def took_in(self, fed: int) -> None:
        self.watch.board.page[Slot.FED] = place(self.lanes.runs, fed)

    @contextmanager
    def leaving(self, fed: int) -> Iterator[None]:
        page = self.watch.board.page
        page[Slot.LEAVING] = place(self.lanes.runs, fed)
        yield
        page[Slot.LEAVING] = 0  # not where it failed: the others shall see it
