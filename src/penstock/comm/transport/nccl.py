"""Lanes between ranks that have a GPU each.

The metadata of a message goes over gloo, in the order of sending. Its tensors follow over NCCL in the same order,
without involving the host. Each direction between two ranks has its own communicator: sends and receives on one
communicator wait for each other, and two ranks that both send first would deadlock.

    sender      compute: ... produce | event ...              receiver   compute: ... wait for event | use ...
                transfer:            wait | send                         transfer: receive | event
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.comm.transport import wire
from penstock.comm.transport.gloo.frame import flat
from penstock.comm.transport.gloo.mesh import GlooMesh, GlooReceiver, GlooSender
from penstock.comm.transport.interface import LaneName, Message, MessageKey
from penstock.errors import FormatError

_FIRST = struct.Struct("<iiqqQ")  # lane, key, bytes of layout; layout and metadata follow
PATIENCE = timedelta(days=1)  # NCCL's own time-out ends processes without a message; the watch reports failures before


class NcclOut:
    """The sending end of one direction between two ranks."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device, heads: GlooSender) -> None:
        """`peer` is its rank in the group."""
        self.group, self.peer, self.device, self.heads = group, peer, device, heads
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.count = 0
        self.closed = False

    def send(self, lane: LaneName, key: MessageKey, message: Message) -> None:
        values = {number: wire.dense(tensor.detach().to(self.device)) for number, tensor in message.values.items()}
        layout = wire.layout_of(values)
        first = _FIRST.pack(*lane, *key, len(layout.packed))
        self.heads.send(
            MessageKey(0, self.count), Message(metadata=first + layout.packed + message.metadata, stamp=message.stamp)
        )
        self.count += 1
        self.transfer([flat(values[field.number]) for field in layout.fields if field.count])

    def close(self) -> None:
        """Close the direction with the first of its lanes that is closed: all messages have been sent by then."""
        if not self.closed:
            self.closed = True
            self.heads.close()

    def transfer(self, parts: list[torch.Tensor]) -> None:
        produced = torch.cuda.current_stream(self.device).record_event()
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(produced)
            _transfer(dist.isend, parts, self.group, self.peer)
        for part in parts:
            part.record_stream(self.stream)  # so its memory is not reused before the send is done


class NcclIn:
    """The receiving end of one direction between two ranks."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device, heads: GlooReceiver) -> None:
        """`peer` is its rank in the group."""
        self.group, self.peer, self.device, self.heads = group, peer, device, heads
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.count = 0
        self._arriving: dict[tuple[LaneName, MessageKey], tuple[Message, torch.Tensor, torch.cuda.Event]] = {}

    def receive(self, lane: LaneName, key: MessageKey) -> Message:
        while (lane, key) not in self._arriving or self.heads.has_arrived(MessageKey(0, self.count)):
            self._start_next()
        message, memory, arrived = self._arriving.pop((lane, key))
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(arrived)
        memory.record_stream(compute)  # it belongs to the transfer stream, which could reuse it too early
        return message

    def _start_next(self) -> None:
        """Start to receive the tensors of the next announced message: NCCL matches transfers by order alone."""
        head = self.heads.receive(MessageKey(0, self.count))
        self.count += 1
        metadata = memoryview(head.metadata)
        if len(metadata) < _FIRST.size:
            raise FormatError("a message's head", f"{_FIRST.size} bytes", f"{len(metadata)}", wire.SAME_VERSION)
        source, target, run, microbatch, length = _FIRST.unpack_from(metadata)
        layout = wire.read_layout(metadata[_FIRST.size : _FIRST.size + length])
        memory, arrived = self.transfer(layout)
        message = Message(views(layout, memory), bytes(metadata[_FIRST.size + length :]), head.stamp)
        self._arriving[LaneName(source, target), MessageKey(run, microbatch)] = message, memory, arrived

    def transfer(self, layout: wire.MessageLayout) -> tuple[torch.Tensor, torch.cuda.Event]:
        with torch.cuda.stream(self.stream):  # so the receive does not wait for earlier work of the compute stream
            memory = torch.empty(layout.bytes, dtype=torch.uint8, device=self.device)
            parts = [memory[field.offset : field.offset + field.bytes] for field in layout.fields if field.count]
            _transfer(dist.irecv, parts, self.group, self.peer)
            return memory, self.stream.record_event()


class NcclSender:
    """The sending end of a lane."""

    def __init__(self, lane: LaneName, out: NcclOut) -> None:
        self.lane, self._out = lane, out

    def send(self, key: MessageKey, message: Message) -> None:
        self._out.send(self.lane, key, message)

    def close(self) -> None:
        """Close the direction. The communicator ends with the process."""
        self._out.close()


class NcclReceiver:
    """The receiving end of a lane."""

    def __init__(self, lane: LaneName, incoming: NcclIn) -> None:
        self.lane, self._in = lane, incoming

    def receive(self, key: MessageKey) -> Message:
        return self._in.receive(self.lane, key)

    def close(self) -> None: ...


def connect(
    pairs: Iterable[tuple[int, int]], rank: int, device: torch.device, mesh: GlooMesh
) -> tuple[dict[int, NcclOut], dict[int, NcclIn]]:
    """Connect the ranks of all directions (from, to), and return this rank's ends by peer. Every rank has to call, with
    the same pairs."""
    outs: dict[int, NcclOut] = {}
    ins: dict[int, NcclIn] = {}
    for a, b in sorted(set(pairs)):
        group = dist.new_group([a, b], backend="nccl", timeout=PATIENCE)
        heads = LaneName(-1 - a, -1 - b)  # no stage has such a number
        if rank == a:
            outs[b] = NcclOut(group, int(b > a), device, mesh.sender(heads, b))
        elif rank == b:
            ins[a] = NcclIn(group, int(a > b), device, mesh.receiver(heads, a))
    _meet(sorted(set(pairs)), rank, outs, ins)
    return outs, ins


def _meet(pairs: list[tuple[int, int]], rank: int, outs: dict[int, NcclOut], ins: dict[int, NcclIn]) -> None:
    """Transfer one byte in each direction. NCCL connects two ranks at their first transfer, for which the host waits,
    so all ranks do it here in one order."""
    for a, b in pairs:
        if rank == a:
            outs[b].transfer([torch.zeros(1, dtype=torch.uint8, device=outs[b].device)])
            outs[b].stream.synchronize()
        elif rank == b:
            one = wire.Field(0, torch.uint8, (1,), (1,), 0, 1)
            _, arrived = ins[a].transfer(wire.MessageLayout((one,), 1))
            arrived.synchronize()


def _transfer(operation: Callable[..., Any], parts: list[torch.Tensor], group: dist.ProcessGroup, peer: int) -> None:
    """Transfer all parts of a message as one NCCL operation. The current stream waits for it, not the host."""
    if parts:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(operation, part, group=group, group_peer=peer) for part in parts]
        ):
            work.wait()


def views(layout: wire.MessageLayout, memory: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the tensors of a message in device memory, not as views, which autograd would follow."""
    tensors = {}
    for number, dtype, shape, stride, offset, count in layout.fields:
        if count:
            storage, place = memory.untyped_storage(), offset // dtype.itemsize
            tensors[number] = torch.empty(0, dtype=dtype, device=memory.device).set_(storage, place, shape, stride)
        else:
            tensors[number] = torch.empty_strided(shape, stride, dtype=dtype, device=memory.device)
    return tensors
