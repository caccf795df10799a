"""Layouts and heads as bytes: what is packed is read back, and whatever else comes is one error."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.comm.transport.interface import MessageKey
from penstock.comm.transport.wire import (
    CODES,
    HEAD_BYTES,
    carried,
    dense,
    is_dense,
    layout_of,
    pack_head,
    read_head,
    read_layout,
    views,
)
from penstock.errors import FormatError, InputError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
TYPES = sorted(CODES, key=str)


def tensor_of(dtype, shape, seed=0):
    """Random bits, but for bool, whose bytes are 0 and 1."""
    size = torch.Size(shape).numel() * dtype.itemsize
    limit = 2 if dtype == torch.bool else 256
    bits = torch.randint(0, limit, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


@st.composite
def tensors(draw):
    """Of any type and up to six dimensions: permuted, sliced, stepped, expanded, or offset."""
    shape = draw(st.lists(st.integers(0, 4), max_size=6))
    tensor = tensor_of(draw(st.sampled_from(TYPES)), shape, draw(st.integers(0, 99)))
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for at in range(tensor.dim()):
        how = draw(st.sampled_from(["all", "all", "step", "tail", "expand"]))
        if how == "step":
            tensor = tensor[(slice(None),) * at + (slice(None, None, 2),)]
        elif how == "tail":
            tensor = tensor[(slice(None),) * at + (slice(1, None),)]
        elif how == "expand" and tensor.shape[at] == 1:
            tensor = tensor.expand(*tensor.shape[:at], 3, *tensor.shape[at + 1 :])
    return tensor


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def bits(tensor):
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).flatten()
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.integers(0, 1 << 40), tensors(), max_size=4))
def test_what_is_packed_is_read_back(values):
    sendable = {number: dense(tensor) for number, tensor in values.items()}
    layout = layout_of(sendable)
    assert read_layout(layout.packed) == layout
    got = views(read_layout(layout.packed), memoryview(bytearray(layout.bytes + 1)))
    for number, tensor in values.items():
        got[number].copy_(sendable[number])
        assert same_bits(got[number], tensor)
        if is_dense(tensor.shape, tensor.stride()):
            assert sendable[number] is tensor
            assert got[number].stride() == tensor.stride()
        else:
            assert got[number].is_contiguous()
    for number, tensor in values.items():  # none of them lies on another
        assert same_bits(got[number], tensor)


@settings(deadline=None, max_examples=200)
@given(tensors())
def test_dense_means_what_torch_means_by_it(tensor):
    ours, theirs = is_dense(tensor.shape, tensor.stride()), torch.ops.aten.is_non_overlapping_and_dense(tensor)
    assert ours == theirs or tensor.numel() == 0


@settings(deadline=None, max_examples=200)
@given(tensors())
def test_carried_is_what_arrives(tensor):
    moved = carried(tensor)
    sendable = dense(tensor)
    assert same_bits(moved, tensor)
    assert moved.stride() == sendable.stride()
    assert moved.data_ptr() % 64 == 0


def test_carried_keeps_what_is_fit_and_copies_what_is_not():
    base = torch.randn(64, 64)
    for fit in (base, base.t(), base[1:], torch.tensor(1.0), torch.empty(0, 3)):
        assert carried(fit) is fit
    for unfit in (base.flatten()[1:], base[:, :5], base[0].expand(3, 64), torch.randn(4, dtype=torch.cfloat).conj()):
        assert carried(unfit) is not unfit
        assert torch.equal(carried(unfit), unfit)
    sparse = torch.eye(3).to_sparse()
    assert carried(sparse) is sparse


def test_conjugates_and_negatives_are_worked_out():
    complex_ones = torch.randn(5, dtype=torch.complex64)
    for lazy in (complex_ones.conj(), complex_ones.conj().imag, torch._neg_view(torch.randn(5))):
        found = dense(lazy)
        assert torch.equal(found, lazy)
        assert not found.is_conj()
        assert not found.is_neg()


def test_forty_dimensions():
    tensor = torch.randn((2, 3) + (1,) * 38).transpose(0, 1)
    layout = read_layout(layout_of({5: tensor}).packed)
    assert views(layout, memoryview(bytearray(64)))[5].stride() == tensor.stride()


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.ones(3, device="meta")])
def test_tensors_that_are_not_ordinary_are_refused(tensor):
    with pytest.raises(InputError, match="value 3"):
        layout_of({3: tensor})


def a_layout():
    return layout_of({1: torch.ones(3, 4), 2: torch.ones(5, 2, dtype=torch.int64).t()})


def test_a_payload_that_is_too_short_is_an_error():
    with pytest.raises(FormatError):
        views(a_layout(), memoryview(bytearray(a_layout().bytes - 1)))


@settings(deadline=None, max_examples=500)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_layout_or_one_error(data):
    read_and_touch(data)


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_a_layout_with_wrong_bytes_gives_a_layout_or_one_error(data):
    packed = bytearray(a_layout().packed)
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    read_and_touch(bytes(packed[: data.draw(st.integers(0, len(packed)))]))


def read_and_touch(data):
    """Whatever was read can be written to from end to end, within what it says of itself."""
    try:
        layout = read_layout(data)
        room = min(layout.bytes, 1 << 20)
        found = views(layout, memoryview(bytearray(room)))
    except FormatError:
        return
    for tensor in found.values():
        assert tensor.numel() * tensor.itemsize <= room
        tensor.zero_()


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((1 << 62, 1 << 62), (0, 0)),
        ((-1,), (1,)),
        ((3,), (-1,)),
        ((3,), (2,)),
        ((1 << 40,), (1,)),
    ],
)
def test_shapes_that_cannot_be(shape, stride):
    packed = struct.pack("<IQ", 1, 64) + struct.pack("<qBxHxxxxQ", 0, CODES[torch.uint8], len(shape), 0)
    with pytest.raises(FormatError):
        views(read_layout(packed + struct.pack(f"<{2 * len(shape)}q", *shape, *stride)), memoryview(bytearray(64)))


@given(st.integers(0, (1 << 63) - 1), st.integers(-5, 1 << 40), st.integers(-5, 1 << 40))
def test_heads(stamp, run, microbatch):
    packed = pack_head(MessageKey(run, microbatch), stamp, 77, 5)
    assert len(packed) == HEAD_BYTES
    assert read_head(packed) == (MessageKey(run, microbatch), stamp, 77, 5)


@pytest.mark.parametrize("data", [b"", bytes(HEAD_BYTES), b"x" * 200, pack_head(MessageKey(0, 0), 0, 0, 0)[:-1]])
def test_wrong_heads(data):
    with pytest.raises(FormatError, match="head"):
        read_head(data)
