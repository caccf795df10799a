"""The sending end of a shared lane."""

from __future__ import annotations

import ctypes
import os
import secrets
import time

import torch

from penstock.comm.transport.interface import LaneName, Message, MessageKey, Waiting
from penstock.comm.transport.shared import mapping
from penstock.comm.transport.shared.end import LaneEnd, Store, place
from penstock.comm.transport.shared.ring import (
    ELSEWHERE,
    ENTRIES,
    ENTRY_BYTES,
    MARK,
    RING_BYTES,
    SLOTS,
    Ring,
    Slots,
    TensorSlot,
    pack_entry,
    rounded,
)
from penstock.comm.transport.wire import dense, layout_of

LAYOUTS = 1024  # layouts that both ends cache; both clear the cache at the same message
SMALL = 1 << 16  # bytes up to which a plain memory copy beats a call of torch

_move = ctypes.PyDLL(None).memmove
_move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_move.restype = None

Signature = tuple[object, ...]  # the key of a plan: everything that decides how tensors are copied


class _Plan:
    """The way to send messages of one signature, cached because it takes longer to compute than a small message to
    send."""

    __slots__ = ("dense", "layout", "moves", "need", "number", "payload", "size", "small")

    def __init__(self, number: int, tensors: dict[int, torch.Tensor]) -> None:
        sendable = {n: dense(tensor) for n, tensor in tensors.items()}
        self.number, self.layout = number, layout_of(sendable)
        self.payload = self.layout.bytes
        self.need = self.payload + len(self.layout.packed)  # always with room for the layout, so that all have one size
        self.size = rounded(self.need)
        self.moves = [(field.offset, field.bytes) for field in self.layout.fields]
        # the signature does not hold whether a complex tensor is conjugated
        self.dense = all(sendable[n] is tensor and not tensor.is_complex() for n, tensor in tensors.items())
        self.small = self.payload <= SMALL and all(tensor.is_cpu for tensor in tensors.values())


class SharedSender(LaneEnd):
    """The sending end, for one thread. Raises OSError, when created or in `send`, if there is no memory; nothing was
    sent then."""

    def __init__(self, name: LaneName, store: Store, waiting: Waiting, peer: int) -> None:
        self._waiting, self._peer = waiting, peer
        self._file = mapping.create(f"penstock-{'-'.join(map(str, name))}")
        mark = secrets.token_bytes(MARK)
        try:
            mapping.allocate(self._file, 0, RING_BYTES)
            self._ring: Ring | None = Ring(mapping.map_piece(self._file, 0, RING_BYTES), mark)
        except OSError:
            os.close(self._file)
            raise
        self._slots = Slots(self._file, RING_BYTES)
        self._freed = self._numbers = 0
        self._limit = ENTRIES  # messages up to which the ring has room; reading `taken` again costs a cache miss
        self._plans: dict[Signature, _Plan] = {}
        super().__init__()
        store.set(place(name), f"{os.getpid()} {self._file} {mark.hex()}")

    @property
    def bytes(self) -> int:
        """Size of all slots, in use or free."""
        return self._slots.bytes

    def send(self, key: MessageKey, message: Message) -> None:
        ring, values, metadata, layout_bytes = self._ready(), message.values, message.metadata, 0
        plan = self._plans.get(signature := _signature(values))
        fresh = plan is None
        if plan is None:
            plan = _Plan(self._numbers, values)
        slot = self._slots.take(rounded(plan.need + len(metadata)) if metadata else plan.size)
        try:
            _fill(slot, plan, values)
            if fresh or metadata:
                layout_bytes = _add_metadata(slot, plan, metadata, fresh)
        except BaseException:
            self._slots.give(slot.number)
            raise
        run, microbatch = key
        offset, size = slot.place
        pack_entry(
            ring.entries, ring.count % ENTRIES * ENTRY_BYTES, run, microbatch, message.stamp, offset, size,
            plan.payload, slot.number, plan.number, len(metadata), layout_bytes,
        )  # fmt: skip
        ring.publish()
        if fresh:
            self._remember(signature, plan)

    def send_elsewhere(self, key: MessageKey) -> None:
        """Note, after `send` found no memory, that the message goes over another lane. Needs no memory."""
        self._ready().write(key.run, key.microbatch, 0, 0, 0, 0, ELSEWHERE, 0, 0, 0)

    def close(self) -> None:
        """Close the lane. A connected receiver still receives what was sent."""
        if self._ring is not None:
            self._ring.closed[0] = 1
            self._ring.post()
        super().close()

    def drop(self) -> None:
        os.close(self._file)
        self._ring = None
        self._slots.drop()

    def _ready(self) -> Ring:
        """Return the ring with room for one more message; collect the slots that were freed."""
        ring = self._ring
        if ring is None:
            raise self.misused()
        free = ring.free
        while number := free[self._freed % SLOTS]:
            free[self._freed % SLOTS] = 0
            self._slots.give(number - 1)
            self._freed += 1
        if ring.count == self._limit:
            self._wait_for_room(ring)
        return ring

    def _wait_for_room(self, ring: Ring) -> None:
        begin = time.monotonic()
        while ring.count - ring.taken[0] >= ENTRIES:
            time.sleep(0.001)
            self._waiting.check(self._peer, time.monotonic() - begin)
        self._limit = ring.taken[0] + ENTRIES

    def _remember(self, signature: Signature, plan: _Plan) -> None:
        if len(self._plans) == LAYOUTS:
            self._plans.clear()
        self._plans[signature] = plan
        self._numbers += 1


def _signature(values: dict[int, torch.Tensor]) -> Signature:
    if len(values) == 1:  # the usual case
        ((number, t),) = values.items()
        return number, t.dtype, t.shape, t.stride(), t.is_neg(), t.is_cpu
    return tuple([_signature({number: t}) for number, t in values.items()])


def _fill(slot: TensorSlot, plan: _Plan, values: dict[int, torch.Tensor]) -> None:
    """Copy the tensors to the slot: the only copy of the message."""
    tensors = values.values() if plan.dense else [dense(tensor) for tensor in values.values()]
    if plan.small:
        at = slot.address
        for tensor, move in zip(tensors, plan.moves):  # noqa: B905 (being strict takes time)
            _move(at + move[0], tensor.data_ptr(), move[1])
    else:
        for target, tensor in zip(slot.targets(plan.layout), tensors, strict=True):
            target.copy_(tensor.detach())


def _add_metadata(slot: TensorSlot, plan: _Plan, metadata: bytes, fresh: bool) -> int:
    """Write metadata, and the layout where it is new, behind the tensors. Return the layout's bytes."""
    packed = plan.layout.packed if fresh else b""
    slot.piece[plan.payload : plan.payload + len(metadata) + len(packed)] = metadata + packed
    return len(packed)
