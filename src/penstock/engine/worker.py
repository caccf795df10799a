"""One rank of a pipeline in its own process: the rows of its slot, one after the other, with real transfers.

It never starts a schedule that was not proven. A receive waits; a send never does. Between two rows the clock is read
once, and the board that other ranks see is told what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.core.action import Op
from penstock.core.check import Proven
from penstock.core.lowered_loop import ActionRow
from penstock.engine.acting import Acting, apart_in, flat
from penstock.engine.clock import Clock
from penstock.engine.lanes import Lanes
from penstock.engine.mailing import Mailing
from penstock.engine.watch.watch import Watch
from penstock.engine.weigh import Act, Weigh
from penstock.model.loss import Total
from penstock.model.stage import Job, Stage


class Worker:
    """Runs one rank's part of a mini-batch of a synchronous schedule."""

    def __init__(
        self,
        proven: Proven,
        rank: int,
        stages: list[Stage],
        lanes: Lanes,
        watch: Watch,
        turn: Callable[[int], None] = lambda stage: None,
        clock: Clock | None = None,
    ) -> None:
        self.actions = [action for action in flat(proven.schedule.actions(rank)) if action.op <= Op.RECV_B]
        self.rows = [ActionRow(a.op, a.stage, a.microbatch, a.version, a.peer) for a in self.actions]
        self.acting, self.lanes, self.watch, self.clock = (
            Acting(stages, apart_in(self.actions), turn),
            lanes,
            watch,
            clock,
        )
        device = stages[0].settings.device
        ends = {row.stage: row.microbatch for row in self.rows if row.op is Op.SEND_B and row.peer == row.stage - 1}
        self.mailing = Mailing(self.acting, lanes, device, ends=ends)
        self.weigh = None if clock is None else Weigh(self.acting, device)

    def run(self, jobs: list[Job]) -> Total:
        """Forward and backward of all micro-batches; gradients are in the parameters. Returns the loss of all."""
        self.acting.begin(jobs)
        self.mailing.next_run()
        with running(self.watch), self.acting.watched():
            act = self.acting.act if self.weigh is None else self.weigh.begin()
            self._rows(self.watch.doing, self.clock, act)
        return self.mailing.loss()

    def _rows(self, doing: Callable[[ActionRow], None], clock: Clock | None, act: Act) -> None:
        if clock is not None:
            clock.begin()
        for row in self.rows:
            doing(row)
            op, stage, microbatch, _, peer = row
            if op <= Op.FB:
                act(op, stage, microbatch)
            elif op in (Op.SEND_F, Op.SEND_B):
                self.mailing.send(stage, microbatch, peer)
            else:
                self.mailing.receive(stage, microbatch, peer)
            if clock is not None:
                clock.tick()

    def forward(self, jobs: list[Job]) -> list[Any]:
        """Forwards alone."""
        self.mailing.next_run()
        self.acting.begin(jobs)
        with running(self.watch), self.acting.watched():
            return self.mailing.forward(jobs, self.acting.turn)

    def close(self) -> None:
        """Let go of the lanes; every rank has to."""
        self.lanes.close()

    def drop(self) -> None:
        """Forget what an interrupted step has left behind."""
        self.acting.drop()


@contextmanager
def running(watch: Watch) -> Iterator[None]:
    """Around rows: a failure is told to the other ranks before it goes up."""
    try:
        yield
    except BaseException as error:
        watch.failed(error)
        raise
    finally:
        watch.outside()
