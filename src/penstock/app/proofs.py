"""Schedules that have been built and proven, remembered for the next plan that they serve."""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.core.check import Proven, prove
from penstock.schedules.registry import schedule

MOST_ROWS = 8_000_000  # of all that are remembered, at about 40 bytes


class Asked(NamedTuple):
    """All that decides a schedule."""

    name: str
    stages: int
    microbatches: int
    batches: int
    replicas: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    chunks: int
    options: tuple[tuple[str, Any], ...]

    def prove(self) -> Proven:
        asked = self._asdict() | dict(self.options)
        del asked["options"]
        if self.chunks == 1:
            del asked["chunks"]
        return prove(schedule(**asked))


class Proofs:
    """Those asked for last, as many as have `most` rows together."""

    def __init__(self, most: int = MOST_ROWS) -> None:
        self.most, self.rows = most, 0
        self._known: dict[Asked, Proven] = {}  # the one asked for last comes last

    def __len__(self) -> int:
        return len(self._known)

    def of(self, asked: Asked) -> Proven:
        found = self._known.pop(asked, None)
        if found is None:
            found = asked.prove()
            self.rows += len(found.schedule)
        self._known[asked] = found
        while self.rows > self.most:
            oldest = next(iter(self._known))
            self.rows -= len(self._known.pop(oldest).schedule)
        return found
