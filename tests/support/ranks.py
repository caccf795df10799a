"""Ranks as real processes, for tests: started by hand or by a launcher, waited for with a limit, never left behind.

They are forked from a process that has torch loaded (see nursery), unless a test wants to start a program.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nursery

HERE = Path(__file__).parent
LOOP = str(HERE / "rank_loop.py")
PATIENCE = 100.0  # seconds: torch alone may take many to load on a busy machine


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def env(**more: object) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "GLOO"))}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": nursery.PYTHONPATH,
        **{name: str(value) for name, value in more.items()},
    }


class Run:
    """A started process with its own group, and what it and its children say, in files. `command` is a program, or a
    script to be forked, alone or as so many `ranks` under a launcher."""

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        folder: Path,
        *,
        fork: bool = False,
        ranks: int = 0,
        modules: tuple[str, ...] = (),
    ) -> None:
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        folder.mkdir(parents=True, exist_ok=True)
        self.process: subprocess.Popen[bytes] | nursery.Started
        with self.out.open("w") as out, self.err.open("w") as err:
            if fork:
                self.process = nursery.start(command, env, out.fileno(), err.fileno(), ranks=ranks, modules=modules)
            else:
                self.process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, process_group=0
                )

    def wait(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)

    @property
    def said(self) -> str:
        return self.err.read_text()

    def pids(self) -> dict[int, int]:
        """The processes of the ranks that have begun."""
        found = re.findall(r"rank (\d+) begins as (\d+)", self.out.read_text())
        return {int(rank): int(pid) for rank, pid in found}

    def begun(self, size: int) -> dict[int, int]:
        until = time.monotonic() + PATIENCE
        while len(self.pids()) < size:
            assert time.monotonic() < until, self.said
            assert self.process.poll() is None, self.said
            time.sleep(0.02)
        return self.pids()

    def end(self) -> None:
        for pid in (self.process.pid, *self.pids().values()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


@contextmanager
def launched(
    folder: Path,
    size: int,
    *words: str,
    script: str = LOOP,
    fork: bool = True,
    modules: tuple[str, ...] = (),
    **more: object,
) -> Iterator[Run]:
    """Under penstock's own launcher; without `fork`, it and the ranks are programs that begin from nothing. Forked ones
    have `modules` loaded, too."""
    if fork:
        run = Run([script, *words], env(**more), folder, fork=True, ranks=size, modules=modules)
    else:
        command = [sys.executable, "-c", nursery.LAUNCH, str(size), sys.executable, "-W", "error", script, *words]
        run = Run(command, env(**more), folder)
    try:
        yield run
    finally:
        run.end()


@contextmanager
def by_hand(folder: Path, ranks: list[int], size: int, *words: str, **more: object) -> Iterator[list[Run]]:
    """Each rank on its own, as somebody without a launcher would; rank 0 holds the store."""
    place = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **more}
    runs = [
        Run([LOOP, *words], env(**place, RANK=rank), folder / str(number), fork=True)
        for number, rank in enumerate(ranks)
    ]
    try:
        yield runs
    finally:
        for run in runs:
            run.end()


def alive(pid: int) -> bool:
    """Running: neither gone nor waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def all_gone(pids: list[int], seconds: float) -> float:
    """How long it takes until they have all ended."""
    began = time.monotonic()
    while any(map(alive, pids)):
        assert time.monotonic() - began < seconds, f"still there: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.01)
    return time.monotonic() - began
