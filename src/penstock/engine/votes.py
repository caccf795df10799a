"""A question to all ranks of which the answer is yes or no: whether all is well.

It is asked before every update, so it must cost next to nothing. On one host each rank writes its answer on its board
and reads those of the others: nobody sends anything, and whoever comes last waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

from penstock.engine.watch.board import Page, Slot
from penstock.engine.watch.watch import Watch

NAP = 20e-6  # seconds between two looks at a rank that has not answered yet
ASK = 0.05  # seconds between two questions whether it still can


class Votes:
    """The questions of one rank. All ranks ask in the same order."""

    def __init__(self, watch: Watch, size: int, gather: Callable[[bytes], list[bytes]]) -> None:
        self.watch, self.gather = watch, gather
        self.near = len(watch.pages) == size - 1
        self.count = 0

    def all_well(self, well: bool) -> bool:
        """Whether all ranks say so. None of them goes on before all have said it."""
        if not self.near:
            return all(part == b"y" for part in self.gather(b"y" if well else b"n"))
        self.count += 1
        # Two places in turn: who is quick may answer the next question before all have read this one's answer.
        slot = Slot.VOTES + self.count % 2
        self.watch.board.page[slot] = self.count << 1 | well
        return all([well, *(self._answer(rank, page, slot) for rank, page in self.watch.pages.items())])

    def _answer(self, rank: int, page: Page, slot: int) -> bool:
        asked = 0.0
        began = monotonic()
        while page.page[slot] >> 1 != self.count:
            if monotonic() - asked > ASK:
                asked = monotonic()
                self.watch.check(rank, asked - began)
            sleep(NAP)
        return bool(page.page[slot] & 1)
