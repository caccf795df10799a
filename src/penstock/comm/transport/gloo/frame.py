"""The frame: the first transfer of every message over a process group. All frames have one size, so that receives can
be posted before the size of a message is known.

    kind, lane | head | layout, metadata | payload

Data that does not fit follows in separate transfers: layout and metadata first where they are long, then every tensor
directly from its memory. A small message is one transfer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.comm.transport import wire
from penstock.comm.transport.interface import LaneName, Message, MessageKey
from penstock.errors import FormatError

FRAME_BYTES = 4096
MESSAGE, END, END_RECEIVED = 1, 2, 3  # END_RECEIVED: its sender has received the end of every lane

_FIRST = struct.Struct("<BBxxiiHH")  # kind, whether the payload is in the frame, stages and replicas of the lane
_METADATA = _FIRST.size + wire.HEAD_BYTES  # offset of layout and metadata

Fetch = Callable[[int, list[tuple[int, int]]], torch.Tensor]  # total bytes, (offset, length) of each transfer -> memory


@dataclass(frozen=True)
class PackedMessage:
    """The transfers of one message: the frame, then the parts in order, as flat bytes."""

    frame: torch.Tensor
    parts: list[torch.Tensor]


@dataclass(frozen=True)
class ReceivedFrame:
    """The content of a received frame; `message` is empty unless the kind is MESSAGE."""

    kind: int
    lane: LaneName
    key: MessageKey
    message: Message
    size: int  # bytes of its tensors


def pack(lane: LaneName, key: MessageKey, message: Message) -> PackedMessage:
    """Pack a message. Only data that fits into the frame, and data on a device, is copied."""
    values = {number: wire.dense(tensor.detach().cpu()) for number, tensor in message.values.items()}
    layout = wire.layout_of(values)
    metadata = layout.packed + message.metadata
    begin = wire.aligned(_METADATA + len(metadata))
    inside = begin + layout.bytes <= FRAME_BYTES
    frame = torch.empty(FRAME_BYTES, dtype=torch.uint8, device="cpu")
    view = bytes_of(frame)
    _FIRST.pack_into(view, 0, MESSAGE, inside, *lane)
    view[_FIRST.size : _METADATA] = wire.pack_head(key, message.stamp, len(layout.packed), len(message.metadata))
    parts = []
    if _METADATA + len(metadata) <= FRAME_BYTES:
        view[_METADATA : _METADATA + len(metadata)] = metadata
    else:
        parts.append(torch.frombuffer(bytearray(metadata), dtype=torch.uint8))
    for field in layout.fields:
        if inside and field.count:
            at = begin + field.offset
            frame[at : at + field.bytes].copy_(flat(values[field.number]))
        elif field.count:
            parts.append(flat(values[field.number]))
    return PackedMessage(frame, parts)


def pack_end(lane: LaneName) -> PackedMessage:
    """Return the frame that ends a lane."""
    return _control_frame(END, lane)


def pack_end_received() -> PackedMessage:
    """Return the frame that confirms the end of all lanes."""
    return _control_frame(END_RECEIVED, LaneName(-1, -1))


def _control_frame(kind: int, lane: LaneName) -> PackedMessage:
    frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8, device="cpu")
    _FIRST.pack_into(bytes_of(frame), 0, kind, False, *lane)
    return PackedMessage(frame, [])


def read(frame: torch.Tensor, fetch: Fetch) -> ReceivedFrame:
    """Decode a frame; `fetch` receives the transfers that follow it. The tensors are views of the received memory."""
    view = bytes_of(frame)
    kind, inside, *ends = _FIRST.unpack_from(view)
    lane = LaneName(*ends)
    if kind in (END, END_RECEIVED):
        return ReceivedFrame(kind, lane, MessageKey(0, 0), Message(), 0)
    if kind != MESSAGE:
        raise FormatError("a frame", f"a kind from {MESSAGE} to {END_RECEIVED}", kind, wire.SAME_VERSION)
    head = wire.read_head(view[_FIRST.size : _METADATA])
    length = head.layout + head.metadata
    if _METADATA + length <= FRAME_BYTES:
        metadata = view[_METADATA : _METADATA + length]
    else:
        metadata = bytes_of(fetch(length, [(0, length)]))
    layout = wire.read_layout(metadata[: head.layout])
    if inside:
        payload = view[wire.aligned(_METADATA + length) :]
    else:
        stretches = [(field.offset, field.bytes) for field in layout.fields if field.count]
        payload = bytes_of(fetch(layout.bytes, stretches))
    message = Message(wire.views(layout, payload), bytes(metadata[head.layout :]), head.stamp)
    return ReceivedFrame(kind, lane, head.key, message, layout.bytes)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as bytes."""
    size = tensor.numel() * tensor.itemsize
    start = tensor.storage_offset() * tensor.itemsize
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), start, (size,), (1,))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a memoryview of a tensor of bytes. The view keeps the tensor alive."""
    return tensor.numpy().data
