"""A whole message in one stretch of bytes, for what is sent rarely: batches from rank 0, results to every rank."""

from __future__ import annotations

from penstock.engine.transport.lane import Key, Message
from penstock.engine.transport.wire import (
    DO,
    HEAD_BYTES,
    dense,
    layout_of,
    pack_head,
    read_head,
    read_layout,
    views,
)
from penstock.errors import FormatError


def to_bytes(message: Message) -> bytes:
    tensors = {number: dense(tensor.detach().cpu()) for number, tensor in message.values.items()}
    layout = layout_of(tensors)
    head = pack_head(Key(0, 0), message.stamp, len(layout.packed), len(message.told))
    payload = bytearray(layout.bytes)
    for number, place in views(layout, memoryview(payload)).items():
        place.copy_(tensors[number])
    return b"".join((head, layout.packed, message.told, payload))


def from_bytes(data: bytes) -> Message:
    head = read_head(data)
    told = HEAD_BYTES + head.layout
    payload = told + head.told
    if payload > len(data):
        raise FormatError("a message", f"{payload} bytes or more", f"{len(data)}", DO)
    values = views(read_layout(data[HEAD_BYTES:told]), memoryview(bytearray(data[payload:])))
    return Message(values, data[told:payload], head.stamp)
