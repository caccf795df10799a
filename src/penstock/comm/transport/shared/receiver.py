"""The receiving end of a shared lane."""

from __future__ import annotations

import errno
import itertools
import os
import time
import weakref
from typing import NamedTuple

import torch

from penstock.comm.transport.interface import ClosedLane, LaneName, Message, MessageKey, Waiting
from penstock.comm.transport.shared import mapping
from penstock.comm.transport.shared.end import LaneEnd, SentElsewhere, Store, place
from penstock.comm.transport.shared.ring import ELSEWHERE, RING_BYTES, SLOTS, Ring
from penstock.comm.transport.shared.sender import LAYOUTS
from penstock.comm.transport.wire import SAME_VERSION, MessageLayout, read_layout, views
from penstock.errors import FormatError

SPIN = 20e-6  # seconds of polling before the process yields
YIELD = 500e-6  # seconds of polling before the process sleeps, yielding the core in between
LOOKS = range(8)  # polls between two reads of the clock
POLL = 0.2  # seconds of sleep between two failure checks


class _Loan(weakref.ref[memoryview]):
    """A weak reference to a slot's memory that calls back when the last tensor on it is deleted."""

    __slots__ = ("bytes", "slot")
    bytes: int
    slot: int


class _Ahead(NamedTuple):
    """Tensors made in advance for a message that has not arrived yet."""

    piece: memoryview
    layout: MessageLayout
    lent: memoryview
    values: dict[int, torch.Tensor]


class SharedReceiver(LaneEnd):
    """The receiving end, for one thread; its tensors may be deleted in any. Connects at the first message, or by
    `connect`."""

    def __init__(self, name: LaneName, store: Store, waiting: Waiting, peer: int) -> None:
        self._place, self._store, self._waiting, self._peer = place(name), store, waiting, peer
        self._file = -1
        self._ring: Ring | None = None
        self._early: dict[tuple[int, int], Message | None] = {}
        self._layouts: dict[int, MessageLayout] = {}
        self._pieces: dict[tuple[int, int], memoryview] = {}  # by offset and size
        self._places: dict[int, tuple[int, int]] = {}  # by slot
        self._loans: dict[int, _Loan] = {}
        self._ended: list[int] = []  # bytes of slots that were returned
        self._returns = itertools.count()
        self._free: memoryview | None = None
        self._held = self._most = 0
        self._last_free, self._last_layout = -1, MessageLayout((), 0)
        self._ahead: _Ahead | None = None
        super().__init__()

    @property
    def bytes_held(self) -> int:
        """Bytes of received tensors that are still in use, those of messages that wait for `receive` included."""
        while self._ended:
            self._held -= self._ended.pop()
        return self._held

    @property
    def most_bytes_held(self) -> int:
        return self._most

    def receive(self, key: MessageKey) -> Message:
        """Return a message. Raises `SentElsewhere` if the sender sent it over another lane."""
        ring = self._ring or self.connect()
        if key in self._early:
            message = self._early.pop(key)
        else:
            while True:
                if ring.try_take():
                    self._wait(ring)
                next_key, message = self._next(ring)
                if next_key == key:
                    break
                self._set_aside(next_key, message)
        if message is None:
            raise SentElsewhere
        return message

    def connect(self) -> Ring:
        """Wait for the sender, and open its memory. Raises OSError where the kernel does not allow it."""
        if not self.is_open:
            raise self.misused()
        if self._ring is None:
            process, file, mark = self._await_sender().split()
            opened = os.open(f"/proc/{int(process)}/fd/{int(file)}", os.O_RDWR | os.O_CLOEXEC)
            try:
                ring = Ring(mapping.map_piece(opened, 0, RING_BYTES))
                if ring.mark != bytes.fromhex(mark):
                    raise OSError(errno.ESTALE, f"process {process} has other memory there than that of the lane")
            except OSError:
                os.close(opened)
                raise
            self._file, self._ring, self._free = opened, ring, ring.free
        return self._ring

    def drop(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._free = self._ring = None
        self._ahead = None
        self._early.clear()
        self._pieces.clear()

    def _await_sender(self) -> str:
        begin = time.monotonic()
        for pause in itertools.chain((0.001, 0.002, 0.005, 0.01), itertools.repeat(0.02)):
            if self._store.check([self._place]):
                break
            self._waiting.check(self._peer, time.monotonic() - begin)
            time.sleep(pause)
        return self._store.get(self._place).decode()

    def _wait(self, ring: Ring) -> None:
        """Wait for one post of the semaphore, or for the end of the lane."""
        begin, sent, read = time.perf_counter(), ring.sent, ring.count
        self._prepare_next()
        while time.perf_counter() - begin < SPIN:
            for _ in LOOKS:
                if sent[0] != read and not ring.try_take():
                    return
        while time.perf_counter() - begin < YIELD:
            os.sched_yield()
            if sent[0] != read and not ring.try_take():
                return
        while not (ring.closed[0] or ring.semaphore.wait(POLL)):
            self._waiting.check(self._peer, time.perf_counter() - begin)

    def _prepare_next(self) -> None:
        """Make tensors for the next message, which likely has the layout of the last one, on the slot that was freed
        last."""
        piece = self._pieces.get(self._places.get(self._last_free, (-1, -1)))
        if piece is not None:
            lent = memoryview(piece)
            if self._last_layout.bytes <= len(lent):
                self._ahead = _Ahead(piece, self._last_layout, lent, views(self._last_layout, lent))

    def _next(self, ring: Ring) -> tuple[tuple[int, int], Message | None]:
        if ring.sent[0] == ring.count:
            raise self._waiting.lost(self._peer, ClosedLane("the sender has closed the lane"))
        run, microbatch, stamp, offset, size, payload, slot, number, metadata, layout_bytes = ring.read()
        if slot == ELSEWHERE:
            return (run, microbatch), None
        mapped = self._pieces.get((offset, size))
        piece = self._open(slot, offset, size) if mapped is None else mapped
        end = payload + metadata
        if end + layout_bytes > size:
            raise FormatError("a message's descriptor", f"at most {size} bytes", f"{end + layout_bytes}", SAME_VERSION)
        layout = (
            self._remember_layout(number, piece[end : end + layout_bytes])
            if layout_bytes
            else self._layouts.get(number)
        )
        if layout is None or layout.bytes != payload:
            raise FormatError("a message's descriptor", "a layout of its payload", f"number {number}", SAME_VERSION)
        ahead, self._ahead, self._last_layout = self._ahead, None, layout
        if ahead is not None and ahead[0] is piece and ahead[1] is layout:
            _, _, lent, values = ahead
        else:
            lent = memoryview(piece)  # for this message alone: deleted with the last of its tensors
            values = views(layout, lent)
        loan = self._loans[slot] = _Loan(lent, self._returned)
        loan.slot, loan.bytes = slot, payload
        while self._ended:
            self._held -= self._ended.pop()
        self._held += payload
        if self._held > self._most:
            self._most = self._held
        return (run, microbatch), Message(values, bytes(piece[payload:end]) if metadata else b"", stamp)

    def _open(self, slot: int, offset: int, size: int) -> memoryview:
        """Map memory that the sender has added, perhaps in place of other memory of that slot."""
        try:
            piece = mapping.map_piece(self._file, offset, size)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise FormatError(
                "a message's descriptor", "a place in the sender's memory", str(error), SAME_VERSION
            ) from None
        if slot in self._places:
            del self._pieces[self._places[slot]]
        self._places[slot] = offset, size
        self._pieces[offset, size] = piece
        return piece

    def _returned(self, loan: _Loan) -> None:  # called in any thread, also within this function itself
        del self._loans[loan.slot]
        self._ended.append(loan.bytes)
        self._last_free = loan.slot
        free = self._free
        if free is not None:
            free[next(self._returns) % SLOTS] = loan.slot + 1

    def _remember_layout(self, number: int, packed: memoryview) -> MessageLayout:
        layout = read_layout(packed)
        if len(self._layouts) == LAYOUTS:
            self._layouts.clear()
        self._layouts[number] = layout
        return layout

    def _set_aside(self, key: tuple[int, int], message: Message | None) -> None:
        if key in self._early:
            raise FormatError("a lane", "every message once", f"run {key[0]}, micro-batch {key[1]} twice", SAME_VERSION)
        self._early[key] = message
