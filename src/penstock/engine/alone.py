"""A world of one process: what a World is to a rank, where there are no others."""

from __future__ import annotations


class Alone:
    """All stages run here."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def all_well(self, well: bool) -> bool:
        return well

    def broadcast(self, data: bytes | None, source: int) -> bytes:
        assert data is not None
        return data
