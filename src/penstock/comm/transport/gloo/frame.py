"""The frame: the first transfer of every message over a process group. All frames have one size, so that receives can
be posted before it is known what comes.

    kind, lane | head | layout, told | payload

What does not fit follows in transfers of its own: the words (layout and told) first where they are long, then every
tensor straight from its memory. A small message is one transfer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.comm.transport import wire
from penstock.comm.transport.interface import Key, LaneName, Message
from penstock.errors import FormatError

FRAME_BYTES = 4096
MESSAGE, END, HEARD = 1, 2, 3  # HEARD: the sender of it has got the end of every lane

_FIRST = struct.Struct("<BBxxiiHH")  # kind, whether the payload is in the frame, stages and replicas of the lane
_WORDS = _FIRST.size + wire.HEAD_BYTES  # where the words begin

Fetch = Callable[[int, list[tuple[int, int]]], torch.Tensor]  # total bytes, stretches that come one by one -> memory


@dataclass(frozen=True)
class Parcel:
    """What to transfer for one message: the frame, then the parts in order. All are flat bytes."""

    frame: torch.Tensor
    parts: list[torch.Tensor]


@dataclass(frozen=True)
class Arrived:
    """What came; `message` is empty unless the kind is MESSAGE."""

    kind: int
    lane: LaneName
    key: Key
    message: Message
    size: int  # bytes of its tensors


def pack(lane: LaneName, key: Key, message: Message) -> Parcel:
    """Nothing is copied except what fits into the frame, and what is on a device."""
    values = {number: wire.dense(tensor.detach().cpu()) for number, tensor in message.values.items()}
    layout = wire.layout_of(values)
    words = layout.packed + message.told
    begin = wire.aligned(_WORDS + len(words))
    inside = begin + layout.bytes <= FRAME_BYTES
    frame = torch.empty(FRAME_BYTES, dtype=torch.uint8, device="cpu")
    view = bytes_of(frame)
    _FIRST.pack_into(view, 0, MESSAGE, inside, *lane)
    view[_FIRST.size : _WORDS] = wire.pack_head(key, message.stamp, len(layout.packed), len(message.told))
    parts = []
    if _WORDS + len(words) <= FRAME_BYTES:
        view[_WORDS : _WORDS + len(words)] = words
    else:
        parts.append(torch.frombuffer(bytearray(words), dtype=torch.uint8))
    for field in layout.fields:
        if inside and field.count:
            at = begin + field.offset
            frame[at : at + field.bytes].copy_(flat(values[field.number]))
        elif field.count:
            parts.append(flat(values[field.number]))
    return Parcel(frame, parts)


def pack_end(lane: LaneName) -> Parcel:
    """Nothing more comes on this lane."""
    return _word(END, lane)


def pack_heard() -> Parcel:
    return _word(HEARD, LaneName(-1, -1))


def _word(kind: int, lane: LaneName) -> Parcel:
    frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8, device="cpu")
    _FIRST.pack_into(bytes_of(frame), 0, kind, False, *lane)
    return Parcel(frame, [])


def read(frame: torch.Tensor, fetch: Fetch) -> Arrived:
    """The message of a frame; `fetch` gets what follows it. The tensors are views of what came."""
    view = bytes_of(frame)
    kind, inside, *ends = _FIRST.unpack_from(view)
    lane = LaneName(*ends)
    if kind in (END, HEARD):
        return Arrived(kind, lane, Key(0, 0), Message(), 0)
    if kind != MESSAGE:
        raise FormatError("a frame", f"a kind from {MESSAGE} to {HEARD}", kind, wire.DO)
    head = wire.read_head(view[_FIRST.size : _WORDS])
    length = head.layout + head.told
    if _WORDS + length <= FRAME_BYTES:
        words = view[_WORDS : _WORDS + length]
    else:
        words = bytes_of(fetch(length, [(0, length)]))
    layout = wire.read_layout(words[: head.layout])
    if inside:
        payload = view[wire.aligned(_WORDS + length) :]
    else:
        stretches = [(field.offset, field.bytes) for field in layout.fields if field.count]
        payload = bytes_of(fetch(layout.bytes, stretches))
    message = Message(wire.views(layout, payload), bytes(words[head.layout :]), head.stamp)
    return Arrived(kind, lane, head.key, message, layout.bytes)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, as bytes."""
    size = tensor.numel() * tensor.itemsize
    start = tensor.storage_offset() * tensor.itemsize
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), start, (size,), (1,))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Those of a tensor of bytes, which they keep alive."""
    return tensor.numpy().data
