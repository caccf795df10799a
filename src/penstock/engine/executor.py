"""The executor: it takes the rows of a schedule one after another and calls the handler for each row's operation.

One process may run all slots, each as far as it can go before it needs a result of another: this is deterministic, and
breakpoints work as in a plain loop. Or each process runs its own slot, with real transfers. A synchronous mini-batch is
a list of rows that ends in updates; asynchronous training is a fill, passes, and a drain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from penstock.comm.watch.watch import Watch
from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow
from penstock.engine.observer import Observer, Observers
from penstock.engine.stage_executor import StageExecutor
from penstock.engine.transfers import Transfers
from penstock.errors import InputError
from penstock.model.loss import Total
from penstock.model.stage import Job, Stage

NOT_BUILT = {Op.UNSHARD: "sharded weights", Op.RESHARD: "sharded weights"}
Handler = Callable[[ActionRow], bool | None]


class Updates(Protocol):
    """The updater, called around the rows that produce gradients and at update rows."""

    def before_forward(self, stage: Stage, job: Job, version: int) -> None:
        """Called before a forward runs."""

    def after_forward(self, stage: Stage, job: Job, result: Any) -> None:
        """Called after a forward has run; `result` is the last stage's."""

    def before_backward(self, stage: Stage, job: Job) -> None:
        """Called before gradients are computed."""

    def after_backward(self, stage: Stage, job: Job) -> None:
        """Called when all gradients of a micro-batch are computed, before any of them is sent."""

    def reduce(self, stage: Stage, version: int) -> None:
        """Begin to add a stage's gradients over its replicas."""

    def update(self, stage: Stage, version: int) -> bool | None:
        """Compute a new version of a stage's weights. Return False if another slot of this process has to run first."""


class WeightSelection(Protocol):
    """The selection of the weights that an action sees."""

    def at(self, op: Op, stage: int, microbatch: int, version: int, replica: int = 0) -> AbstractContextManager[None]:
        """Return the context in which the stage has the weights that the action names."""

    def ready(self, stage: int) -> None:
        """Move the newest weights of a stage to where a forward outside of training needs them."""


class Executor:
    """Runs rows of the slots of one process. `guard` is entered around rows, and told of what fails in them.

    `by_slot`: the stage executor of every slot here, where each has its own, since replicas have different rows.
    """

    def __init__(
        self,
        slots: tuple[int, ...],
        stages: StageExecutor,
        transfers: Transfers,
        weights: WeightSelection,
        updates: Updates,
        observers: Observers,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        by_slot: Sequence[StageExecutor] = (),
    ) -> None:
        self.slots, self.stages, self.transfers = slots, stages, transfers
        self.by_slot = by_slot or (stages,) * len(slots)
        self.parts = list(dict.fromkeys(self.by_slot))  # without repetition
        self.weights, self.updates, self.observers, self.guard = weights, updates, observers, guard
        self.rows: list[list[ActionRow]] = []  # by slot of this process
        self.next: list[int] = []  # by slot, the index of the next row
        self.current = 0  # the slot that is running
        self.handlers: dict[Op, Handler] = dict.fromkeys((Op.F, Op.B, Op.I, Op.W, Op.FB), self._compute)
        self.handlers |= {Op.SEND_F: transfers.send, Op.SEND_B: transfers.send}
        self.handlers |= {Op.RECV_F: transfers.receive, Op.RECV_B: transfers.receive}
        self.handlers |= {Op.REDUCE: self._reduce, Op.UPDATE: self._update, **dict.fromkeys(NOT_BUILT, _refuse)}

    def begin(self, jobs: list[Job], by_slot: Sequence[list[Job]] = ()) -> None:
        """Begin a run, with some micro-batches or none as yet; messages of other runs are not mixed up with its own.
        `by_slot`: the micro-batches of each slot here, where replicas have different rows of them."""
        for stages in self.parts:
            stages.begin([])
        self.stages.begin(jobs)
        for stages, own in zip(self.by_slot, by_slot, strict=bool(by_slot)):
            stages.begin(own)
        self.transfers.begin()

    def add(self, by_slot: Sequence[list[Job]]) -> None:
        """Add the micro-batches of a mini-batch to the current run, as each stage executor here has them."""
        for stages, own in zip(self.parts, by_slot, strict=True):
            stages.add(own)

    def remove(self, by_slot: Sequence[list[Job]]) -> None:
        """Remove the micro-batches of a mini-batch that is done on all stages of this process."""
        for stages, own in zip(self.parts, by_slot, strict=True):
            stages.remove(own)

    def watched(self) -> AbstractContextManager[None]:
        """Return `watching` for a run over its jobs, where a stage here needs it."""
        contexts = [stages.watched() for stages in dict.fromkeys(self.by_slot)]
        return next((one for one in contexts if not isinstance(one, nullcontext)), contexts[0])

    def run(self, rows: list[list[ActionRow]]) -> None:
        """Run rows of every slot of this process: each slot as far as it can go, in turn."""
        self.rows, self.next = rows, [0] * len(rows)
        with self.guard(), self._notify_interruptions():
            advanced = True
            while advanced:
                advanced = False
                for self.current in range(len(rows)):
                    advanced |= self._advance(self.current)
        if any(at < len(slot) for at, slot in zip(self.next, rows, strict=True)):
            raise RuntimeError("rows wait for each other: the schedule was not checked")

    def remaining(self) -> tuple[ActionRow | None, list[list[ActionRow]]]:
        """Return, after a failure, the row that failed, if one has, and all rows that have not run, by slot."""
        waiting = self.rows[self.current][self.next[self.current] :]
        return waiting[0] if waiting else None, [slot[at:] for at, slot in zip(self.next, self.rows, strict=True)]

    def loss(self) -> Total:
        """Return the loss of the mini-batch, on whichever rank its last stage has run."""
        return self.stages.total(self.transfers)

    def forward(self, jobs: list[Job]) -> list[Any]:
        """Run forwards alone, on the first replica of each stage; returns results on the process that has that of the
        last stage, else None for each."""
        self.begin(jobs)
        here = {at: stage for at, stage in self.stages.stages.items() if not stage.replica}
        with self.guard(), self.stages.watched():
            for row in _forward_rows(jobs, here) if here else ():
                if row.op is Op.F:
                    self.weights.ready(row.stage)
                    self.stages.run(row.op, row.stage, row.microbatch)
                else:
                    self.handlers[row.op](row)
        return self.stages.ordered_results

    def drop(self) -> None:
        """Forget what an interrupted run has left behind."""
        for stages in {id(stages): stages for stages in (self.stages, *self.by_slot)}.values():
            stages.drop()

    def close(self) -> None:
        """Close the transfers; every rank has to call."""
        self.transfers.close()

    @contextmanager
    def _notify_interruptions(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for notify in self.observers.interrupted:
                notify()
            raise

    def _advance(self, current: int) -> bool:
        """Run a slot until it ends or has to wait for another slot of this process. Return whether any row has run."""
        slot, first, handlers = self.rows[current], self.next[current], self.handlers
        if first == len(slot):
            return False
        observers = self.observers
        for notify in observers.begin:
            notify(self.slots[current])
        while self.next[current] < len(slot):
            row = slot[self.next[current]]
            for notify in observers.before:
                notify(row)
            if handlers[row.op](row) is False:
                break
            self.next[current] += 1
            for notify in observers.after:
                notify(row)
        return self.next[current] > first

    def _compute(self, row: ActionRow) -> None:
        op, at, microbatch, version = row[:4]
        stages, observers = self.by_slot[self.current], self.observers
        job, stage = stages.jobs[microbatch], stages.stages[at]
        forward = op in (Op.F, Op.FB)
        if forward:
            self.updates.before_forward(stage, job, version)
        else:
            self.updates.before_backward(stage, job)
        with self.weights.at(op, at, microbatch, version, row.replica):
            for notify in observers.stage_begins:
                notify(row)
            stages.run(op, at, microbatch)
            for notify in observers.stage_ends:
                notify(row)
        if forward:
            self.updates.after_forward(stage, job, stages.results.get(microbatch))
        elif op is not Op.I:
            self.updates.after_backward(stage, job)

    def _reduce(self, row: ActionRow) -> None:
        self.updates.reduce(self.by_slot[self.current].stages[row.stage], row.version)

    def _update(self, row: ActionRow) -> bool | None:
        return self.updates.update(self.by_slot[self.current].stages[row.stage], row.version)


def _refuse(row: ActionRow) -> None:
    raise InputError(
        "a schedule whose stages have all their weights",
        f"the row {row.stage} {row.op.name}, of {NOT_BUILT[row.op]}",
        "leave out what shards them",
    )


def _forward_rows(jobs: list[Job], here: dict[int, Stage]) -> Iterator[ActionRow]:
    """Yield the rows of forwards alone: receives, the forward, sends. Where all stages are in this process, one
    micro-batch after another; else one stage after another, so that other ranks can work at the same time."""
    last = len(jobs[0].path.routes) - 1 if jobs else 0
    whole = len(here) == last + 1
    places = [(at, job) for job in jobs for at in here] if whole else [(at, job) for at in here for job in jobs]
    for at, job in places:
        for source in sorted({*job.path.incoming[at].values(), max(at - 1, 0)} - {*here}):
            yield ActionRow(Op.RECV_F, at, job.number, 0, source)
        yield ActionRow(Op.F, at, job.number, 0, -1)
        for target in sorted({*job.path.routes[at], min(at + 1, last)} - {*here}):
            yield ActionRow(Op.SEND_F, at, job.number, 0, target)


class StatusObserver(Observer):
    """An observer that writes the current row on the status page, which other ranks read."""

    def __init__(self, watch: Watch) -> None:
        self.doing = watch.doing

    def before(self, row: ActionRow) -> None:
        self.doing(row)


@contextmanager
def failures_told(watch: Watch) -> Iterator[None]:
    """Report a failure of rows to the other ranks, and raise it again."""
    try:
        yield
    except BaseException as error:
        watch.failed(error)
        raise
    finally:
        watch.outside()
