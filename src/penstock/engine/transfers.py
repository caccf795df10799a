"""Transfers between stages. Within one process only the order of rows is kept; between processes tensors and metadata
are sent."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from penstock.comm.transport.interface import LaneName, Lanes, Message, MessageKey
from penstock.comm.transport.local import LocalLane
from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow
from penstock.engine.passage_words import decode_passage, encode_passage, other_forward
from penstock.engine.replica_rows import ReplicaRows
from penstock.engine.stage_executor import StageExecutor
from penstock.errors import InputError
from penstock.model.loss import Total
from penstock.model.row_names import RowNames
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
    """Over lanes, between processes or between the replicas of one. `news`: whether losses, scales and norms go along
    with the tensors.

    `last_backward`: by stage, the micro-batch whose backward is the last that goes to the stage before. The loss of a
    whole mini-batch goes along with it, so that no collective is needed for it. With replicas, `rows` divides what is
    sent, and `by_replica` has the stages of every replica here.
    """

    def __init__(
        self,
        stages: StageExecutor,
        lanes: Lanes,
        device: torch.device,
        news: bool = False,
        last_backward: Mapping[int, int] = MappingProxyType({}),
        rows: ReplicaRows | None = None,
        by_replica: Mapping[tuple[int, int], StageExecutor] = MappingProxyType({}),
    ) -> None:
        self.stages, self.lanes, self.device, self.news = stages, lanes, device, news
        self.last_backward, self._loss = last_backward, b""
        self.on_host = device.type == "cpu"  # where all that comes lies already
        self.rows, self.by_replica = rows, by_replica
        self.parts: dict[tuple[int, int, int, int], list[Values]] = {}  # stage, replica, peer and micro-batch

    def begin(self) -> None:
        self.lanes.runs += 1
        self.parts.clear()
        self._loss = b""  # an old one must never pass for that of this run

    def send(self, row: ActionRow) -> None:
        _, stage, microbatch, _, peer, peer_replica, replica = row
        stages = self._stages(row)
        job = stages.jobs[microbatch]
        rows = self.rows if job.share is not None else None  # else the first replicas run it alone
        names = job.path.row_names if rows is not None and rows.unequal(stage, peer) else None
        again = rows is not None and peer_replica < rows.peers(stage, replica, peer)[-1]
        outgoing = stages.store.take_outgoing(stage, peer, microbatch, again)
        if rows is not None:
            outgoing = rows.divide(job, outgoing, stage, replica, peer, peer_replica)
        traced = job.path.trace.values
        named = {
            traced[value].key if names is None else names.values[value]: tensor for value, tensor in outgoing.items()
        }
        message = Message(named, self._encode(job, stage, peer, peer_replica), job.stamp)
        lane = LaneName(stage, peer, replica, peer_replica)
        self.lanes.senders[lane].send(MessageKey(self.lanes.runs, microbatch), message)

    def receive(self, row: ActionRow) -> bool:
        _, stage, microbatch, _, peer, peer_replica, replica = row
        receiver, key = self.lanes.receivers[LaneName(peer, stage, peer_replica, replica)], self._key(microbatch)
        if isinstance(receiver, LocalLane) and not receiver.has(key):
            return False
        message = receiver.receive(key)
        stages = self._stages(row)
        job, store = stages.jobs[microbatch], stages.store
        if message.stamp != job.stamp:
            raise InputError(
                "the same batch on every rank",
                f"different ones on the ranks of stages {peer} and {stage}",
                "give every rank the same data (seed the loader alike), or give it on one rank with data='rank0'",
            )
        divided = self.rows is not None and job.share is not None
        names = job.path.row_names if self.rows is not None and divided and self.rows.unequal(stage, peer) else None
        numbers = job.path.crossing if names is None else names.value_numbers
        values = _numbered(numbers, message.values, stage, peer)
        if not self.on_host:
            values = {value: tensor.to(self.device) for value, tensor in values.items()}
        self._decode(job, stage, peer, message.metadata, names)
        if self.rows is not None and divided:
            peers, place = self.rows.peers(stage, replica, peer), (stage, replica, peer, microbatch)
            parts = self.parts.setdefault(place, [])
            parts.append(values)
            if len(parts) < len(peers):
                return True
            values = self.rows.join(job, self.parts.pop(place), stage, replica, peer)
            if names is not None and peer == stage - 1 and job.rows:
                _require_shapes(job, stage)
        _require_expected(job, values, stage, peer)
        if peer < stage:
            store.put_values(stage, microbatch, values)
        else:
            store.put_gradients(stage, microbatch, peer, values)
        return True

    def loss(self) -> Total:
        return Total.unpack(self._loss)

    def close(self) -> None:
        self.lanes.close()

    def _key(self, microbatch: int) -> MessageKey:
        return MessageKey(self.lanes.runs, microbatch)

    def _stages(self, row: ActionRow) -> StageExecutor:
        return self.by_replica.get((row.stage, row.replica), self.stages)

    def _encode(self, job: Job, stage: int, peer: int, peer_replica: int) -> bytes:
        if peer == stage + 1:
            passage, names = job.passage, None
            if self.rows is not None and job.share is not None and self.rows.unequal(stage, peer):
                passage, names = self.rows.passage(job, job.share, peer, peer_replica), job.path.row_names
            words = encode_passage(passage, job.path.trace, names)
            return job.words.down() + words if self.news else words
        if peer == stage - 1 and self.news:
            return job.words.up()
        ends = peer == stage - 1 and self.last_backward.get(stage) == job.number
        return self.stages.total(self).pack() if ends else b""

    def _decode(self, job: Job, stage: int, peer: int, metadata: bytes, names: RowNames | None) -> None:
        if peer < stage:
            if self.news and peer == stage - 1:
                metadata = job.words.heard_down(metadata)
            decode_passage(metadata, job.passage, job.path.trace, names)
        elif peer == stage + 1 and self.news:
            job.words.heard_up(metadata)
        elif peer == stage + 1 and metadata:
            self._loss = metadata


def _numbered(numbers: Mapping[int, int], named: Values, stage: int, peer: int) -> Values:
    """Return what another stage has sent, by this rank's own numbers of the values."""
    try:
        return {numbers[name]: tensor for name, tensor in named.items()}
    except KeyError:
        unknown = sum(name not in numbers for name in named)
        raise other_forward(f"{unknown} values from stage {peer} to {stage} that this one does not have") from None


def _require_shapes(job: Job, stage: int) -> None:
    """Refuse less than all shapes that code here will ask for: a forward of other rows may not have been asked."""
    path, start = job.path, job.path.span(stage)[0]
    known = job.passage.shapes.keys() | path.incoming[stage].keys()
    for number, value in enumerate(path.trace.values):
        if value.asked and not value.free and 0 <= value.made_by < start and number not in known:
            raise other_forward(f"other questions about {path.describe(number)}")


def _require_expected(job: Job, values: Values, stage: int, peer: int) -> None:
    """Refuse less than what this rank's forward has the two stages exchange."""
    expected = job.path.routes[peer].get(stage, ()) if peer < stage and job.rows else ()
    for value in expected:
        if value not in values:
            raise other_forward(f"nothing in place of {job.path.describe(value)}, from stage {peer} to {stage}")
