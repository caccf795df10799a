"""Where this rank's asynchronous training loop is, on the status page that other ranks see.

Ranks that leave their loops at different mini-batches find out at once, instead of waiting for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.comm.transport.interface import Lanes
from penstock.comm.watch.status import PageField, StatusPage, place


class LoopStatus:
    """Writes to the page of this rank; in one process there is none."""

    def __init__(self, status_page: StatusPage | None, lanes: Lanes | None) -> None:
        self.status_page, self.lanes = status_page, lanes

    def took_in(self, mini_batches: int) -> None:
        """Note how many mini-batches have been taken in since the run began."""
        self._write(PageField.FED, mini_batches)

    @contextmanager
    def leaving(self, mini_batches: int) -> Iterator[None]:
        """Note that this rank ends its run behind so many mini-batches, while it finds out whether all do."""
        self._write(PageField.LEAVING, mini_batches)
        yield
        if self.status_page is not None:
            self.status_page.fields[PageField.LEAVING] = 0  # not where it failed: the others shall see it

    def _write(self, slot: PageField, mini_batches: int) -> None:
        if self.status_page is not None and self.lanes is not None:
            self.status_page.fields[slot] = place(self.lanes.runs, mini_batches)
