"""What a rank sends to others and receives from them for its stages: tensors, and the words that go along."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from penstock.engine.acting import Acting
from penstock.engine.lanes import Lanes
from penstock.engine.told import hear, other_forward, tell
from penstock.engine.transport.lane import Key, LaneName, Message
from penstock.errors import InputError
from penstock.model.loss import Total, total_of
from penstock.model.stage import Job, Values


class Mailing:
    """Sends and receives of one rank. `news`: whether losses, scales and norms go along with the tensors.

    `ends`: by stage, the micro-batch whose backward is the last that goes to the stage before. The loss of a whole
    mini-batch goes along with it, so that nobody has to meet for that.
    """

    def __init__(
        self,
        acting: Acting,
        lanes: Lanes,
        device: torch.device,
        news: bool = False,
        ends: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.ends, self._loss = ends, b""
        self.acting, self.lanes, self.device, self.news = acting, lanes, device, news
        self.on_host = device.type == "cpu"  # where all that comes lies already

    def next_run(self) -> None:
        """Messages from now on belong to another run than those before: the same on every rank."""
        self.lanes.runs += 1
        self._loss = b""  # an old one must never pass for that of this run

    def send(self, stage: int, microbatch: int, peer: int) -> None:
        job = self.acting.jobs[microbatch]
        known = job.path.trace.values
        named = {known[v].key: tensor for v, tensor in self.acting.desk.leave(stage, peer, microbatch).items()}
        message = Message(named, self._told(job, stage, peer), job.stamp)
        self.lanes.senders[LaneName(stage, peer)].send(Key(self.lanes.runs, microbatch), message)

    def receive(self, stage: int, microbatch: int, peer: int) -> None:
        message = self.lanes.receivers[LaneName(peer, stage)].receive(Key(self.lanes.runs, microbatch))
        job, desk = self.acting.jobs[microbatch], self.acting.desk
        if message.stamp != job.stamp:
            raise InputError(
                "the same batch on every rank",
                f"another on the rank of stage {peer} than on that of stage {stage}",
                "give every rank the same data (seed the loader alike), or give it on one rank with data='rank0'",
            )
        values = _numbered(job, stage, peer, message.values)
        if not self.on_host:
            values = {value: tensor.to(self.device) for value, tensor in values.items()}
        self._heard(job, stage, peer, message.told)
        if peer < stage:
            desk.put(stage, microbatch, values)
        else:
            desk.put_back(stage, microbatch, peer, values)

    def _told(self, job: Job, stage: int, peer: int) -> bytes:
        if peer == stage + 1:
            told = tell(job.passage, job.path.trace)
            return job.words.down() + told if self.news else told
        if peer == stage - 1 and self.news:
            return job.words.up()
        return self.loss().pack() if peer == stage - 1 and self.ends.get(stage) == job.number else b""

    def _heard(self, job: Job, stage: int, peer: int, told: bytes) -> None:
        if peer < stage:
            if self.news and peer == stage - 1:
                told = job.words.heard_down(told)
            hear(told, job.passage, job.path.trace)
        elif peer == stage + 1 and self.news:
            job.words.heard_up(told)
        elif peer == stage + 1 and told:
            self._loss = told

    def loss(self) -> Total:
        """Of the mini-batch: the last stage's rank knows it when all forwards are done, the others have heard it."""
        found = self.acting.results
        return total_of(found) if found[0] is not None else Total.unpack(self._loss)

    def forward(self, jobs: list[Job], turn: Callable[[int], None]) -> list[Any]:
        """Forwards alone, stage by stage: what is needed comes from the other ranks. The jobs are `acting`'s."""
        for stage in self.acting.stages:
            for job in jobs:
                self._forward(stage, job, turn)
        return self.acting.results

    def _forward(self, stage: int, job: Job, turn: Callable[[int], None]) -> None:
        here, last = self.acting.stages, len(job.path.routes) - 1
        for source in sorted({*job.path.incoming[stage].values(), max(stage - 1, 0)} - {*here}):
            self.receive(stage, job.number, source)
        turn(stage)
        self.acting.forward(stage, job)
        for target in sorted({*job.path.routes[stage], min(stage + 1, last)} - {*here}):
            self.send(stage, job.number, target)


def _numbered(job: Job, stage: int, peer: int, named: Values) -> Values:
    """What another stage has sent, by this rank's own numbers of the values. It must be what this rank's forward has
    the two exchange."""
    path = job.path
    known = path.crossing
    try:
        values = {known[name]: tensor for name, tensor in named.items()}
    except KeyError:
        unknown = sum(name not in known for name in named)
        raise other_forward(f"{unknown} values from stage {peer} to {stage} that this one does not have") from None
    wanted = path.routes[peer].get(stage, ()) if peer < stage and job.rows else values
    for value in wanted:
        if value not in values:
            raise other_forward(f"nothing in place of {path.describe(value)}, from stage {peer} to {stage}")
    return values
