"""Where this rank's asynchronous training loop is, on the status page that other ranks see.

Ranks that leave their loops at different mini-batches find out at once, instead of waiting for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.comm.transport.interface import Lanes
from penstock.comm.watch.status import Board, Slot, place


class LoopStatus:
    """Writes to the page of this rank; in one process there is none."""

    def __init__(self, board: Board | None, lanes: Lanes | None) -> None:
        self.board, self.lanes = board, lanes

    def took_in(self, mini_batches: int) -> None:
        """Note how many mini-batches have been taken in since the run began."""
        self._write(Slot.FED, mini_batches)

    @contextmanager
    def leaving(self, mini_batches: int) -> Iterator[None]:
        """Note that this rank ends its run behind so many mini-batches, while it finds out whether all do."""
        self._write(Slot.LEAVING, mini_batches)
        yield
        if self.board is not None:
            self.board.page[Slot.LEAVING] = 0  # not where it failed: the others shall see it

    def _write(self, slot: Slot, mini_batches: int) -> None:
        if self.board is not None and self.lanes is not None:
            self.board.page[slot] = place(self.lanes.runs, mini_batches)
