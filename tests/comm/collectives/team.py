"""Ranks that stay, for many tests: each does what it is told over a pipe."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from distributed.hosts import HERE, Host, Ranks

SCRIPT = str(Path(__file__).with_name("team_rank.py"))
PATIENCE = 60.0  # seconds for one answer


class Team:
    """Real processes, one a rank."""

    def __init__(self, hosts: Sequence[Host], **environment: str) -> None:
        self.ranks = Ranks()
        self.size = len(hosts)
        with Listener(family="AF_UNIX") as listener:
            self.ranks.start([SCRIPT, str(listener.address)], list(hosts), **environment)
            pipes = [listener.accept() for _ in hosts]
        self.pipes: dict[int, Connection] = {pipe.recv(): pipe for pipe in pipes}

    def tell(self, rank: int, what: str, *words: object) -> None:
        self.pipes[rank].send((what, words))

    def answer(self, rank: int) -> object:
        pipe = self.pipes[rank]
        assert pipe.poll(PATIENCE), f"rank {rank} does not answer"
        try:
            return pipe.recv()
        except EOFError:
            self.ranks.wait(20)
            raise AssertionError(f"rank {rank} has ended\n{self.ranks.ranks[rank].error}") from None

    def ask(self, what: str, *words: object, ranks: Sequence[int] | None = None) -> list:
        """Tell some ranks, or all, the same; their answers, in their order."""
        asked = range(self.size) if ranks is None else ranks
        for rank in asked:
            self.tell(rank, what, *words)
        return [self.answer(rank) for rank in asked]

    def end(self) -> None:
        """All are told to end, and do so in order."""
        for pipe in self.pipes.values():
            with suppress(BrokenPipeError):
                pipe.send(("end", ()))
            pipe.close()
        try:
            for number, rank in enumerate(self.ranks.wait(30)):
                assert rank.code == 0, f"rank {number} exited with {rank.code}\n{rank.error}"
                assert rank.error == "" or "hostname of the client socket" in rank.error
        finally:
            self.ranks.__exit__()

    def gone(self, limit: float) -> float:
        """Seconds until all have ended."""
        began = time.monotonic()
        self.ranks.wait(limit)
        return time.monotonic() - began


def here(size: int) -> list[Host]:
    return [HERE] * size
