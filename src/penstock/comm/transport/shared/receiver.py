"""The receiving end of a shared lane."""

from __future__ import annotations

import errno
import itertools
import os
import time
import weakref
from typing import NamedTuple

import torch

from penstock.comm.transport.interface import ClosedLane, Key, LaneName, Message, Waiting
from penstock.comm.transport.shared import mapping
from penstock.comm.transport.shared.end import Elsewhere, End, Store, place
from penstock.comm.transport.shared.ring import ELSEWHERE, RING_BYTES, SLOTS, Ring
from penstock.comm.transport.shared.sender import LAYOUTS
from penstock.comm.transport.wire import DO, Layout, read_layout, views
from penstock.errors import FormatError

SPIN = 20e-6  # seconds of looking before the process sleeps, which costs about as much
YIELD = 500e-6  # seconds of looking further, between which whoever else wants the core has it
LOOKS = range(8)  # between two at the clock
PIECE = 0.2  # seconds of sleep between two questions whether all is well


class _Loan(weakref.ref[memoryview]):
    """Calls back when the last tensor on a slot is gone."""

    __slots__ = ("bytes", "slot")
    bytes: int
    slot: int


class _Ahead(NamedTuple):
    """Tensors for a message that has not come yet, made while there was time."""

    piece: memoryview
    layout: Layout
    lent: memoryview
    values: dict[int, torch.Tensor]


class SharedReceiver(End):
    """For one thread; tensors may die in any. Connects at the first message, or when told to."""

    def __init__(self, name: LaneName, store: Store, waiting: Waiting, peer: int) -> None:
        self._place, self._store, self._waiting, self._peer = place(name), store, waiting, peer
        self._file = -1
        self._ring: Ring | None = None
        self._early: dict[tuple[int, int], Message | None] = {}
        self._layouts: dict[int, Layout] = {}
        self._pieces: dict[tuple[int, int], memoryview] = {}  # by offset and size
        self._places: dict[int, tuple[int, int]] = {}  # by slot
        self._loans: dict[int, _Loan] = {}
        self._ended: list[int] = []  # bytes of loans
        self._returns = itertools.count()
        self._free: memoryview | None = None
        self._held = self._most = 0
        self._last_free, self._last_layout = -1, Layout((), 0)
        self._ahead: _Ahead | None = None
        super().__init__()

    @property
    def bytes_held(self) -> int:
        """Of tensors that were taken from the lane, here or waiting for `receive`, and are still in use."""
        while self._ended:
            self._held -= self._ended.pop()
        return self._held

    @property
    def most_bytes_held(self) -> int:
        return self._most

    def receive(self, key: Key) -> Message:
        """Raises `Elsewhere` where the sender says so."""
        ring = self._ring or self.connect()
        if key in self._early:
            message = self._early.pop(key)
        else:
            while True:
                if ring.try_take():
                    self._wait(ring)
                came, message = self._next(ring)
                if came == key:
                    break
                self._set_aside(came, message)
        if message is None:
            raise Elsewhere
        return message

    def connect(self) -> Ring:
        """Wait until the sender is there, and open its memory. OSError where the kernel does not allow it."""
        if not self.is_open:
            raise self.misused()
        if self._ring is None:
            process, file, mark = self._await_sender().split()
            opened = os.open(f"/proc/{int(process)}/fd/{int(file)}", os.O_RDWR | os.O_CLOEXEC)
            try:
                found = Ring(mapping.map_piece(opened, 0, RING_BYTES))
                if found.mark != bytes.fromhex(mark):
                    raise OSError(errno.ESTALE, f"process {process} has other memory there than that of the lane")
            except OSError:
                os.close(opened)
                raise
            self._file, self._ring, self._free = opened, found, found.free
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
        """For one post of the semaphore, or for the end of the lane."""
        begin, sent, seen = time.perf_counter(), ring.sent, ring.count
        self._guess()
        while time.perf_counter() - begin < SPIN:
            for _ in LOOKS:
                if sent[0] != seen and not ring.try_take():
                    return
        while time.perf_counter() - begin < YIELD:
            os.sched_yield()
            if sent[0] != seen and not ring.try_take():
                return
        while not (ring.closed[0] or ring.semaphore.wait(PIECE)):
            self._waiting.check(self._peer, time.perf_counter() - begin)

    def _guess(self) -> None:
        """The next message is likely to be laid out as the last one was, on the slot that became free last."""
        piece = self._pieces.get(self._places.get(self._last_free, (-1, -1)))
        if piece is not None:
            lent = memoryview(piece)
            if self._last_layout.bytes <= len(lent):
                self._ahead = _Ahead(piece, self._last_layout, lent, views(self._last_layout, lent))

    def _next(self, ring: Ring) -> tuple[tuple[int, int], Message | None]:
        if ring.sent[0] == ring.count:
            raise self._waiting.lost(self._peer, ClosedLane("the sender has closed the lane"))
        run, microbatch, stamp, offset, size, payload, slot, number, told, words = ring.read()
        if slot == ELSEWHERE:
            return (run, microbatch), None
        known = self._pieces.get((offset, size))
        piece = self._open(slot, offset, size) if known is None else known
        end = payload + told
        if end + words > size:
            raise FormatError("a message's descriptor", f"at most {size} bytes", f"{end + words}", DO)
        layout = self._learn(number, piece[end : end + words]) if words else self._layouts.get(number)
        if layout is None or layout.bytes != payload:
            raise FormatError("a message's descriptor", "a layout of its payload", f"number {number}", DO)
        ahead, self._ahead, self._last_layout = self._ahead, None, layout
        if ahead is not None and ahead[0] is piece and ahead[1] is layout:
            _, _, lent, values = ahead
        else:
            lent = memoryview(piece)  # for this message alone: when the last of its tensors is gone, so is this
            values = views(layout, lent)
        loan = self._loans[slot] = _Loan(lent, self._returned)
        loan.slot, loan.bytes = slot, payload
        while self._ended:
            self._held -= self._ended.pop()
        self._held += payload
        if self._held > self._most:
            self._most = self._held
        return (run, microbatch), Message(values, bytes(piece[payload:end]) if told else b"", stamp)

    def _open(self, slot: int, offset: int, size: int) -> memoryview:
        """Memory that the sender has made since, perhaps in the place of other memory of that slot."""
        try:
            piece = mapping.map_piece(self._file, offset, size)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise FormatError("a message's descriptor", "a place in the sender's memory", str(error), DO) from None
        if slot in self._places:
            del self._pieces[self._places[slot]]
        self._places[slot] = offset, size
        self._pieces[offset, size] = piece
        return piece

    def _returned(self, loan: _Loan) -> None:  # in any thread, also amid this very function
        del self._loans[loan.slot]
        self._ended.append(loan.bytes)
        self._last_free = loan.slot
        free = self._free
        if free is not None:
            free[next(self._returns) % SLOTS] = loan.slot + 1

    def _learn(self, number: int, packed: memoryview) -> Layout:
        layout = read_layout(packed)
        if len(self._layouts) == LAYOUTS:
            self._layouts.clear()
        self._layouts[number] = layout
        return layout

    def _set_aside(self, key: tuple[int, int], message: Message | None) -> None:
        if key in self._early:
            raise FormatError("a lane", "every message once", f"run {key[0]}, micro-batch {key[1]} twice", DO)
        self._early[key] = message
