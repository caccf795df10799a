"""Transfers between stages. Within one process only the order of rows is kept; between processes tensors and metadata
are sent."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from penstock.comm.transport.interface import LaneName, Lanes, Message, MessageKey
from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow
from penstock.engine.passage_words import decode_passage, encode_passage, other_forward
from penstock.engine.stage_executor import StageExecutor
from penstock.errors import InputError
from penstock.model.loss import Total
from penstock.model.stage import Job, Values


class Transfers(Protocol):
    """Sends and receives of the slots of one process."""

    def begin(self) -> None:
        """Begin a new run, on every rank."""

    def send(self, row: ActionRow) -> None:
        """Send what the row names, without waiting for the receiver."""

    def receive(self, row: ActionRow) -> bool:
        """Receive what the row names. Return False if another slot of this process has to run first."""

    def loss(self) -> Total:
        """Return the loss of a mini-batch whose last stage another process runs."""

    def close(self) -> None:
        """Close the lanes; every rank has to call."""


class LocalTransfers:
    """Transfers between stages of one process: the activation store holds the tensors, only the order of rows is
    checked."""

    def __init__(self) -> None:
        self.sent: set[tuple[bool, int, int, int]] = set()  # forward or not, stages from and to, and micro-batch

    def begin(self) -> None:
        self.sent.clear()

    def send(self, row: ActionRow) -> None:
        self.sent.add((row.op is Op.SEND_F, row.stage, row.peer, row.microbatch))

    def receive(self, row: ActionRow) -> bool:
        place = (row.op is Op.RECV_F, row.peer, row.stage, row.microbatch)
        if place not in self.sent:
            return False
        self.sent.remove(place)
        return True

    def loss(self) -> Total:
        raise AssertionError("one process has its own loss")

    def close(self) -> None:
        """Do nothing: no other process waits for this one."""


class StageTransfers:
    """Transfers between processes, over lanes. `news`: whether losses, scales and norms accompany the tensors.

    `last_backward`: by stage, the micro-batch whose backward is the last to be sent to the stage before. The loss of a
    whole mini-batch is sent with it, so that no collective is needed for it.
    """

    def __init__(
        self,
        stages: StageExecutor,
        lanes: Lanes,
        device: torch.device,
        news: bool = False,
        last_backward: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.stages, self.lanes, self.device, self.news = stages, lanes, device, news
        self.last_backward, self._loss = last_backward, b""
        self.on_host = device.type == "cpu"  # received tensors are in host memory already

    def begin(self) -> None:
        self.lanes.runs += 1
        self._loss = b""  # an old loss must never be taken for that of this run

    def send(self, row: ActionRow) -> None:
        stage, microbatch, peer = row.stage, row.microbatch, row.peer
        job = self.stages.jobs[microbatch]
        traced = job.path.trace.values
        outgoing = self.stages.store.take_outgoing(stage, peer, microbatch)
        named = {traced[value].key: tensor for value, tensor in outgoing.items()}
        message = Message(named, self._encode(job, stage, peer), job.stamp)
        self.lanes.senders[LaneName(stage, peer)].send(MessageKey(self.lanes.runs, microbatch), message)

    def receive(self, row: ActionRow) -> bool:
        stage, microbatch, peer = row.stage, row.microbatch, row.peer
        message = self.lanes.receivers[LaneName(peer, stage)].receive(MessageKey(self.lanes.runs, microbatch))
        job, store = self.stages.jobs[microbatch], self.stages.store
        if message.stamp != job.stamp:
            raise InputError(
                "the same batch on every rank",
                f"different ones on the ranks of stages {peer} and {stage}",
                "give every rank the same data (seed the loader alike), or give it on one rank with data='rank0'",
            )
        values = _numbered(job, stage, peer, message.values)
        if not self.on_host:
            values = {value: tensor.to(self.device) for value, tensor in values.items()}
        self._decode(job, stage, peer, message.metadata)
        if peer < stage:
            store.put_values(stage, microbatch, values)
        else:
            store.put_gradients(stage, microbatch, peer, values)
        return True

    def loss(self) -> Total:
        return Total.unpack(self._loss)

    def close(self) -> None:
        self.lanes.close()

    def _encode(self, job: Job, stage: int, peer: int) -> bytes:
        if peer == stage + 1:
            metadata = encode_passage(job.passage, job.path.trace)
            return job.words.down() + metadata if self.news else metadata
        if peer == stage - 1 and self.news:
            return job.words.up()
        ends = peer == stage - 1 and self.last_backward.get(stage) == job.number
        return self.stages.total(self).pack() if ends else b""

    def _decode(self, job: Job, stage: int, peer: int, metadata: bytes) -> None:
        if peer < stage:
            if self.news and peer == stage - 1:
                metadata = job.words.heard_down(metadata)
            decode_passage(metadata, job.passage, job.path.trace)
        elif peer == stage + 1 and self.news:
            job.words.heard_up(metadata)
        elif peer == stage + 1 and metadata:
            self._loss = metadata


def _numbered(job: Job, stage: int, peer: int, named: Values) -> Values:
    """Return what another stage has sent, by this rank's numbers of the values. Raise if it is not what this rank's
    forward expects."""
    path = job.path
    numbers = path.crossing
    try:
        values = {numbers[name]: tensor for name, tensor in named.items()}
    except KeyError:
        unknown = sum(name not in numbers for name in named)
        raise other_forward(f"{unknown} values from stage {peer} to {stage} that this one does not have") from None
    expected = path.routes[peer].get(stage, ()) if peer < stage and job.rows else values
    for value in expected:
        if value not in values:
            raise other_forward(f"nothing in place of {path.describe(value)}, from stage {peer} to {stage}")
    return values
