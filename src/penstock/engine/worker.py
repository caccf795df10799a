"""One rank of a pipeline in its own process: the rows of its slot, one after the other, with real transfers.

It never starts a schedule that was not proven. A receive waits; a send never does. Between two rows the clock is read
once, and the board that other ranks see is told what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.core.action import Action, Op
from penstock.core.check import Proven
from penstock.engine.acting import Acting, flat
from penstock.engine.clock import Clock
from penstock.engine.lanes import Lanes
from penstock.engine.told import hear, tell
from penstock.engine.transport.lane import Key, LaneName, Message
from penstock.engine.watch.board import OUTSIDE
from penstock.engine.watch.watch import Watch
from penstock.engine.weigh import Act, Weigh
from penstock.errors import InputError
from penstock.model.stage import Job, Stage
from penstock.model.walk import watching

Row = tuple[Op, int, int, int]  # what, stage, micro-batch, the stage at the other end


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
        actions = [action for action in flat(proven.schedule.actions(rank)) if action.op <= Op.RECV_B]
        self.rows: list[Row] = [(a.op, a.stage, a.microbatch, a.peer) for a in actions]
        self.acting, self.lanes, self.watch, self.clock = Acting(stages, actions, turn), lanes, watch, clock
        watch.describe(lambda row: _words(actions[row]))
        self.device = stages[0].settings.device
        self.weigh = None if clock is None else Weigh(self.acting, self.device)
        self.runs = 0  # the same on every rank
        self.stamp = 0  # of the batch at hand

    def run(self, jobs: list[Job]) -> list[Any]:
        """Forward and backward of all micro-batches; gradients are in the parameters. Returns what the jobs made."""
        with self._running(jobs):
            act = self.acting.act if self.weigh is None else self.weigh.begin()
            self._rows(self.watch.doing, self.clock, act)
        return self.acting.results

    def _rows(self, doing: Callable[[int], None], clock: Clock | None, act: Act) -> None:
        if clock is not None:
            clock.begin()
        for at, (op, stage, microbatch, peer) in enumerate(self.rows):
            doing(at)
            if op <= Op.FB:
                act(op, stage, microbatch)
            elif op in (Op.SEND_F, Op.SEND_B):
                self.send(stage, microbatch, peer)
            else:
                self.receive(stage, microbatch, peer)
            if clock is not None:
                clock.tick()

    def forward(self, jobs: list[Job]) -> list[Any]:
        """Forwards alone, stage by stage: what is needed comes from the other ranks."""
        with self._running(jobs):
            for stage in self.acting.stages:
                for job in jobs:
                    self._forward(stage, job)
        return self.acting.results

    def _forward(self, stage: int, job: Job) -> None:
        here, last = self.acting.stages, len(job.path.routes) - 1
        for source in sorted({*job.path.incoming[stage].values(), max(stage - 1, 0)} - {*here}):
            self.receive(stage, job.number, source)
        self.acting.turn(stage)
        self.acting.forward(stage, job)
        for target in sorted({*job.path.routes[stage], min(stage + 1, last)} - {*here}):
            self.send(stage, job.number, target)

    @contextmanager
    def _running(self, jobs: list[Job]) -> Iterator[None]:
        """Around all rows: a failure is told to the other ranks before it goes up."""
        self.runs += 1
        self.acting.begin(jobs)
        try:
            with watching():
                yield
        except BaseException as error:
            self.watch.failed(error)
            raise
        finally:
            self.watch.doing(OUTSIDE)

    def close(self) -> None:
        """Let go of the lanes; every rank has to."""
        self.lanes.close()

    def drop(self) -> None:
        """Forget what an interrupted step has left behind."""
        self.acting.drop()

    def send(self, stage: int, microbatch: int, peer: int) -> None:
        job = self.acting.jobs[microbatch]
        told = tell(job.passage, job.path.trace) if peer == stage + 1 else b""
        message = Message(self.acting.desk.leave(stage, peer, microbatch), told, self.stamp)
        self.lanes.senders[LaneName(stage, peer)].send(Key(self.runs, microbatch), message)

    def receive(self, stage: int, microbatch: int, peer: int) -> None:
        message = self.lanes.receivers[LaneName(peer, stage)].receive(Key(self.runs, microbatch))
        if message.stamp != self.stamp:
            raise InputError(
                "the same batch on every rank",
                f"another on the rank of stage {peer} than on that of stage {stage}",
                "give every rank the same data (seed the loader alike), or give it on one rank with data='rank0'",
            )
        job, desk = self.acting.jobs[microbatch], self.acting.desk
        values = {value: tensor.to(self.device) for value, tensor in message.values.items()}
        if peer < stage:
            hear(message.told, job.passage, job.path.trace)
            desk.put(stage, microbatch, values)
        else:
            desk.put_back(stage, microbatch, peer, values)


def _words(action: Action) -> str:
    return f"{action} (stage {action.stage}, micro-batch {action.microbatch})"
