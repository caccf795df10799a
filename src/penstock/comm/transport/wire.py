"""The encoding of a message as bytes, in fixed binary fields: no pickle, so received data cannot run code.

    head | layout | metadata | payload

The head has a fixed size and holds the lengths of the rest. The layout lists the number, type, shape and offset of
every tensor. `to_bytes` and `from_bytes` convert a whole message, for messages that are rare: batches from rank 0,
results to every rank.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from penstock.comm.transport.interface import Message, MessageKey
from penstock.errors import FormatError, InputError

ALIGNMENT = 64  # of torch's own memory, so that kernels take the same path on both ends
MAGIC, VERSION = 0x4E504D57, 1
SAME_VERSION = "run the same version of penstock and of torch on every rank"

# the index in this list is the code in a message: only append
# fmt: off
_NAMES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    "complex32", "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
]
# fmt: on
TYPES: dict[int, torch.dtype] = {code: getattr(torch, name) for code, name in enumerate(_NAMES) if hasattr(torch, name)}
CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in TYPES.items()}

Packed = bytes
_COUNT = struct.Struct("<IQ")  # tensors, bytes of payload
_FIELD = struct.Struct("<qBxHxxxxQ")  # number, type, dimensions, offset; then as many sizes, then as many strides
_HEAD = struct.Struct("<IIqqQQQ")  # magic, version, run, micro-batch, stamp, bytes of layout, of metadata
HEAD_BYTES = _HEAD.size


class Field(NamedTuple):
    """The place and form of one tensor in the payload."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    count: int  # type: ignore[assignment]  # elements

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the tensor has the strides of a contiguous one, also in dimensions of size one."""
        return all(self.stride[at] == math.prod(self.shape[at + 1 :]) for at in range(len(self.shape)))


@dataclass(frozen=True)
class MessageLayout:
    """The places and forms of all tensors of a message; `bytes` is the length of the payload."""

    fields: tuple[Field, ...]
    bytes: int

    @cached_property
    def packed(self) -> Packed:
        parts = [_COUNT.pack(len(self.fields), self.bytes)]
        for number, dtype, shape, stride, offset, _ in self.fields:
            parts.append(_FIELD.pack(number, CODES[dtype], len(shape), offset))
            parts.append(struct.pack(f"<{2 * len(shape)}q", *shape, *stride))
        return b"".join(parts)

    @cached_property
    def recipes(self) -> tuple[tuple[Field, bool], ...]:
        """Every field, and whether it has dimensions and is contiguous."""
        return tuple((field, bool(field.shape) and field.contiguous) for field in self.fields)


class Head(NamedTuple):
    """The first bytes of a message: its key and stamp, and the lengths of layout and metadata."""

    key: MessageKey
    stamp: int
    layout: int  # bytes
    metadata: int  # bytes


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as the other end of a lane receives it: itself where its memory is dense, else a contiguous
    copy.

    Memory that does not begin at a multiple of 64 bytes is copied too: vector kernels add in another order there.
    """
    sendable = dense(tensor)
    if sendable.layout is torch.strided and sendable.data_ptr() % ALIGNMENT:
        return sendable.clone()  # keeps the strides of dense memory
    return sendable


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a contiguous copy where its elements do not fill one stretch of memory without gaps."""
    if tensor.layout is not torch.strided:
        return tensor  # sparse, for example, without such memory
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    plain = tensor.resolve_conj().resolve_neg()
    return plain if is_dense(plain.shape, plain.stride()) else plain.contiguous()


def is_dense(shape: Iterable[int], stride: Iterable[int]) -> bool:
    """Whether elements of this shape and these strides fill one stretch of memory, each byte once."""
    sized = list(zip(stride, shape, strict=True))
    if any(size == 0 for _, size in sized):
        return True
    expected = 1
    for step, size in sorted(pair for pair in sized if pair[1] > 1):
        if step != expected:
            return False
        expected *= size
    return True


def layout_of(values: dict[int, torch.Tensor]) -> MessageLayout:
    """Return the layout of tensors that are dense already."""
    fields, at = [], 0
    for number, tensor in values.items():
        if tensor.layout is not torch.strided or tensor.dtype not in CODES or tensor.is_meta:
            raise refusal(number, tensor)
        field = Field(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), at, tensor.numel())
        fields.append(field)
        at += aligned(field.bytes)
    return MessageLayout(tuple(fields), at)


def refusal(number: int, tensor: torch.Tensor) -> InputError:
    return InputError(
        "tensors between stages to be ordinary (strided, in memory, of a plain type)",
        f"value {number}: {tensor.layout} of {tensor.dtype} on {tensor.device}",
        "convert it before the end of the stage",
    )


def aligned(size: int) -> int:
    return (size + ALIGNMENT - 1) & -ALIGNMENT


def read_layout(data: bytes | memoryview) -> MessageLayout:
    """Decode a layout. Whatever the bytes are, the fields of the result lie within its payload."""
    try:
        count, size = _COUNT.unpack_from(data)
        at, fields = _COUNT.size, []
        for _ in range(count):
            number, code, dimensions, offset = _FIELD.unpack_from(data, at)
            lengths = struct.unpack_from(f"<{2 * dimensions}q", data, at + _FIELD.size)
            at += _FIELD.size + 16 * dimensions
            fields.append(_field(number, code, lengths[:dimensions], lengths[dimensions:], offset, size))
    except struct.error:
        raise FormatError("a message's layout", "more bytes", f"{len(data)}", SAME_VERSION) from None
    if at != len(data) or len({field.number for field in fields}) != count:
        raise FormatError("a message's layout", f"{at} bytes and {count} numbers", f"{len(data)} bytes", SAME_VERSION)
    return MessageLayout(tuple(fields), size)


def _field(number: int, code: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, room: int) -> Field:
    where = f"value {number} of a message"
    if code not in TYPES:
        raise FormatError(where, "a type that torch has", f"code {code}", SAME_VERSION)
    if any(length < 0 for length in shape + stride) or not is_dense(shape, stride):
        raise FormatError(where, "dense memory", f"shape {shape} with strides {stride}", SAME_VERSION)
    field = Field(number, TYPES[code], shape, stride, offset, math.prod(shape))
    if offset % ALIGNMENT or offset + field.bytes > room:
        raise FormatError(where, f"a place within {room} bytes", f"{field.bytes} bytes at {offset}", SAME_VERSION)
    return field


def views(layout: MessageLayout, payload: memoryview) -> dict[int, torch.Tensor]:
    """Return the tensors as views of writable memory, without a copy. Each keeps `payload` alive."""
    if len(payload) < layout.bytes:
        raise FormatError("a message's payload", f"{layout.bytes} bytes", f"{len(payload)}", SAME_VERSION)
    tensors = {}
    for (number, dtype, shape, stride, offset, count), contiguous in layout.recipes:
        if count:
            flat = torch.frombuffer(payload, dtype=dtype, count=count, offset=offset)
            # in place, so that autograd sees no view; the first is the faster call
            tensors[number] = flat.resize_(*shape) if contiguous else flat.as_strided_(shape, stride)
        else:
            tensors[number] = _empty(number, dtype, shape, stride)
    return tensors


def _empty(number: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    try:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    except RuntimeError:  # sizes whose product, without the zero, is more than torch can count
        raise FormatError(
            f"value {number} of a message", "a shape that torch can hold", f"{shape}", SAME_VERSION
        ) from None


def pack_head(key: MessageKey, stamp: int, layout: int, metadata: int) -> bytes:
    """Return the head of a message. `layout` and `metadata` are lengths in bytes."""
    return _HEAD.pack(MAGIC, VERSION, key.run, key.microbatch, stamp, layout, metadata)


def read_head(data: bytes | memoryview) -> Head:
    """Decode the first HEAD_BYTES of a message."""
    if len(data) < HEAD_BYTES:
        raise FormatError("a message's head", f"{HEAD_BYTES} bytes", f"{len(data)}", SAME_VERSION)
    magic, version, run, microbatch, stamp, layout, metadata = _HEAD.unpack_from(data)
    if (magic, version) != (MAGIC, VERSION):
        raise FormatError(
            "a message's head", f"the mark {MAGIC:#x}, version {VERSION}", f"{magic:#x}, {version}", SAME_VERSION
        )
    return Head(MessageKey(run, microbatch), stamp, layout, metadata)


def to_bytes(message: Message) -> bytes:
    """Return a whole message as bytes."""
    tensors = {number: dense(tensor.detach().cpu()) for number, tensor in message.values.items()}
    layout = layout_of(tensors)
    head = pack_head(MessageKey(0, 0), message.stamp, len(layout.packed), len(message.metadata))
    payload = bytearray(layout.bytes)
    for number, place in views(layout, memoryview(payload)).items():
        place.copy_(tensors[number])
    return b"".join((head, layout.packed, message.metadata, payload))


def from_bytes(data: bytes) -> Message:
    """Return the message that `to_bytes` encoded."""
    head = read_head(data)
    metadata = HEAD_BYTES + head.layout
    payload = metadata + head.metadata
    if payload > len(data):
        raise FormatError("a message", f"{payload} bytes or more", f"{len(data)}", SAME_VERSION)
    values = views(read_layout(data[HEAD_BYTES:metadata]), memoryview(bytearray(data[payload:])))
    return Message(values, data[metadata:payload], head.stamp)
