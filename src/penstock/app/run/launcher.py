"""Start the ranks of a run as processes of this host, and see to it that they end together.

The environment is that of torchrun. The store is on a loopback port that the launcher took beforehand, in a process of
its own: torch has it, and takes seconds to load, in which a process hears no signal. The launcher has made the page on
which each rank says what it does: what a rank was doing can be told even if none is left. A worker asks the kernel to
die with the launcher before it becomes the command.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, TextIO

from penstock.app.run import socket_folders
from penstock.comm.transport.shared.mapping import available
from penstock.comm.watch import status
from penstock.comm.watch.report import Failure
from penstock.comm.watch.status import Nameless, Page, Slot, State
from penstock.errors import InputError

# argv: address, port, and the descriptor of the socket that listens there. It ends when the launcher closes its input.
HOLD = """
import os, sys
from torch._C._distributed_c10d import TCPStore
address, port, fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
os.read(0, 1)
os._exit(0)
"""


@contextmanager
def holding_store(listener: socket.socket) -> Iterator[None]:
    """The store at a socket that listens. Ranks start meanwhile: what they ask waits there until torch is loaded."""
    address, port = listener.getsockname()[:2]
    words = [sys.executable, "-c", HOLD, address, str(port), str(listener.fileno())]
    fds = (listener.fileno(),)
    # A process group of its own: Ctrl-C is the launcher's to hear.
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=fds, process_group=0)
    listener.close()
    try:
        yield
    finally:
        holder.kill()
        holder.communicate()


GRACE = 4.4  # seconds that the others have to end by themselves after the first has failed: all are to end within five
HASTE = 3.5  # the same after Ctrl-C
TICK = 100  # milliseconds
LOOPBACK = "127.0.0.1"
LIGHTEST = 64 << 20  # bytes of its own that a worker takes at the very least; with torch it is more than twice that

# argv: the launcher's process number, then the command. Python ignores two signals that the command must not.
BECOME = """
import ctypes, os, signal, sys
ask = getattr(ctypes.CDLL(None), "prctl", None)  # elsewhere than on Linux, the ranks look after it themselves
if ask is not None:
    ask(1, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass
class Crew:
    """The workers that were started; `codes` of those that have ended, in the order in which they did."""

    boards: list[Nameless] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)  # the same, to read
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)  # that came to the launcher
    killed: set[int] = field(default_factory=set)  # by the launcher
    folders: set[Path] = field(default_factory=set)  # of processes that it has sent signals

    def send(self, number: int) -> None:
        """To every worker that runs, and to what it has started."""
        for rank in range(len(self.workers)):
            if rank not in self.codes:
                self._signal(rank, number)

    def end_those_not_joined(self) -> None:
        """After a failure: ranks that have not met the others cannot hear of it from them."""
        lost = next(rank for rank, code in self.codes.items() if code)
        for rank, page in enumerate(self.pages):
            if rank not in self.codes and page.blank:
                self.killed.add(rank)
                self._signal(rank, signal.SIGTERM)
            elif rank not in self.codes:
                os.pwrite(self.boards[rank].fd, (lost + 1).to_bytes(8, sys.byteorder), 8 * Slot.GONE)

    def _signal(self, rank: int, number: int) -> None:
        group = self.workers[rank].pid
        self.folders |= socket_folders.socket_folders(group)
        if number == signal.SIGKILL:
            self.killed.add(rank)
        with suppress(ProcessLookupError):
            os.killpg(group, number)

    def close(self) -> None:
        for file, page in zip(self.boards, self.pages, strict=True):
            file.take_name()
            os.close(file.fd)
            os.close(page.fd)
        socket_folders.remove(self.folders)


def launch(command: list[str], workers: int, words: TextIO | None = None) -> int:
    """Run `command` as that many ranks. Returns 0, or the code of the rank that failed first (128 + signal).

    `words` is a file for what the ranks say, and for what is said of them; else it goes where this process's does.
    """
    _require(command, workers)
    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    port, crew = int(listener.getsockname()[1]), Crew()
    try:
        for rank in range(workers):
            crew.boards.append(status.create_page(rank))
            crew.pages.append(Page(crew.boards[rank].fd))
        with _passing_on(crew), holding_store(listener):
            try:
                for rank in range(workers):
                    crew.workers.append(_start(command, rank, workers, port, crew.boards[rank].path, words))
                _wait(crew)
            finally:
                crew.send(signal.SIGKILL)
                for worker in crew.workers:
                    worker.wait()
        return _outcome(crew, words or sys.stderr)
    finally:
        crew.close()


def _require(command: list[str], workers: int) -> None:
    if workers < 1:
        raise InputError("at least one worker", workers, "ask for one for every rank of the schedule")
    most = available() // LIGHTEST
    if workers > most:
        raise InputError(f"at most {most} workers, for which this host has memory", workers, "ask for fewer")
    if not command or shutil.which(command[0]) is None:
        raise InputError("a command that can be run", " ".join(command) or "none", "check its name and PATH")


def _start(
    command: list[str], rank: int, size: int, port: int, page: str, words: TextIO | None
) -> subprocess.Popen[bytes]:
    env = {
        "OMP_NUM_THREADS": "1",  # the ranks share the cores
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        status.VARIABLE: page,
    }
    env.pop("TORCHELASTIC_RUN_ID", None)
    born = [sys.executable, "-I", "-S", "-c", BECOME, str(os.getpid()), *command]
    # A process group of its own: Ctrl-C then comes to the launcher alone, which passes it on once.
    return subprocess.Popen(born, env=env, stdin=subprocess.DEVNULL, stdout=words, stderr=words, process_group=0)


@contextmanager
def _passing_on(crew: Crew) -> Iterator[None]:
    """Signals that end the launcher end its workers: once as they came, then without asking."""

    def handler(number: int, frame: FrameType | None) -> None:
        crew.signals.append(number)
        crew.send(number if len(crew.signals) == 1 else signal.SIGKILL)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(ending) != signal.SIG_IGN:
                before[ending] = signal.signal(ending, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _wait(crew: Crew) -> None:
    """Until all have ended, or the time is over that is left to them after the first failure."""
    ends, until = _Ends(crew.workers), None
    while len(crew.codes) < len(crew.workers) and (until is None or monotonic() < until):
        for rank in ends.wait():
            crew.codes[rank] = _bury(crew, rank)
        if until is None and (crew.signals or any(crew.codes.values())):
            until = monotonic() + (HASTE if crew.signals else GRACE)
            if not crew.signals:
                crew.end_those_not_joined()
    ends.close()


class _Ends:
    """Which workers have ended: as the kernel tells at once, or elsewhere as they are asked ten times a second."""

    def __init__(self, workers: list[subprocess.Popen[bytes]]) -> None:
        self.left = dict(enumerate(workers))
        self.ranks: dict[int, int] = {}
        self.poll = select.poll()
        if hasattr(os, "pidfd_open"):
            self.ranks = {os.pidfd_open(worker.pid): rank for rank, worker in self.left.items()}
        for fd in self.ranks:
            self.poll.register(fd, select.POLLIN)

    def wait(self) -> list[int]:
        """Those that have ended since the last question; after a tick none."""
        ready = [fd for fd, _ in self.poll.poll(TICK)]
        for fd in ready:
            self.poll.unregister(fd)
        ended = [self.ranks[fd] for fd in ready]
        if not self.ranks:
            ended = [rank for rank, worker in self.left.items() if worker.poll() is not None]
        for rank in ended:
            del self.left[rank]
        return ended

    def close(self) -> None:
        for fd in self.ranks:
            os.close(fd)


def _bury(crew: Crew, rank: int) -> int:
    """The code of a worker that has ended; what a failed one had started ends too, while its number is still taken."""
    worker, failed = crew.workers[rank], True
    if hasattr(os, "waitid"):
        end = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        failed = end is not None and (end.si_code != os.CLD_EXITED or end.si_status != 0)
    else:
        failed = worker.wait() != 0
    if failed:
        crew.folders |= socket_folders.socket_folders(worker.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
    return worker.wait()


def _outcome(crew: Crew, out: TextIO) -> int:
    if crew.signals:
        return 128 + crew.signals[0]
    late = sorted(crew.killed - set(crew.codes))
    if not any(crew.codes.values()) and not late:
        return 0
    told = _told(crew.pages)
    rank = _first(crew, told)
    print(f"penstock: {_words(rank, crew.codes[rank], told, crew.pages[rank])}", file=out, flush=True)
    if late:
        who = ", ".join(map(str, late))
        print(f"penstock: still running {GRACE:.1f} s later, and ended: rank {who}", file=out, flush=True)
    code = crew.codes[rank] or next(code for code in crew.codes.values() if code)
    return code if code > 0 else 128 - code


def _first(crew: Crew, told: Failure | None) -> int:
    """The rank at fault: as the ranks say; else one that a signal has ended; else the first to fail."""
    if told is not None and told.rank in crew.codes:
        return told.rank
    failed = {rank: code for rank, code in crew.codes.items() if code and rank not in crew.killed}
    return next((rank for rank, code in failed.items() if code < 0), next(iter(failed)))


def _words(rank: int, code: int, told: Failure | None, page: Page) -> str:
    if told is not None and rank in told.silent:
        return f"rank {rank} gave no sign of life and was ended"
    amid = page.state in (State.STARTING, State.RUNNING) and not page.blank  # it has told nobody
    place = f" {page.place}" if amid else ""
    if code == 0:
        why = ": does its code call os._exit?" if amid else ""
        return f"rank {rank} left with code 0{place}, where others needed it{why}"
    if code > 0:
        return f"rank {rank} ended with code {code}{place}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    why = ", possibly out of memory" if -code == signal.SIGKILL else ""
    if page.blank:
        place = " before it met the others"
    return f"rank {rank} ended by signal {-code} ({name}){why}{',' if place else ''}{place}"


def _told(pages: list[Page]) -> Failure | None:
    """The first that the ranks have said about it."""
    said = [page for page in pages if page.state == State.FAILED]
    return Failure.decode(min(said, key=lambda page: page[Slot.TOLD_AT]).report()) if said else None
