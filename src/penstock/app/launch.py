"""Start the ranks of a run as processes of this host, and see to it that they end together.

The environment is that of torchrun. The launcher holds the store, on a loopback port that it took beforehand. A worker
asks the kernel to die with the launcher before it becomes the command.
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
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from penstock.engine.transport.memory import available
from penstock.errors import InputError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from penstock.engine.watch.failure import Failure

GRACE = 4.4  # seconds that the others have to end by themselves after the first has failed: all are to end within five
HASTE = 3.5  # the same after Ctrl-C
TICK = 100  # milliseconds
LOOPBACK = "127.0.0.1"
LIGHTEST = 64 << 20  # bytes of its own that a worker takes at the very least; with torch it is more than twice that

# argv: the launcher's process number, then the command. Python ignores two signals that the command must not.
BECOME = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass
class Crew:
    """The workers that were started; `codes` of those that have ended, in the order in which they did."""

    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)  # that came to the launcher
    killed: set[int] = field(default_factory=set)

    def send(self, number: int) -> None:
        """To every worker that runs, and to what it has started."""
        for rank, worker in enumerate(self.workers):
            if rank not in self.codes:
                if number == signal.SIGKILL:
                    self.killed.add(rank)
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, number)


def launch(command: list[str], workers: int, words: TextIO | None = None) -> int:
    """Run `command` as that many ranks. Returns 0, or the code of the rank that failed first (128 + signal).

    `words` is a file for what the ranks say, and for what is said of them; else it goes where this process's does.
    """
    _require(command, workers)
    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    port, crew = int(listener.getsockname()[1]), Crew()
    with _passing_on(crew), _holding_store(listener) as store:
        try:
            for rank in range(workers):
                crew.workers.append(_start(command, rank, workers, port, words))
            _wait(crew)
        finally:
            crew.send(signal.SIGKILL)
            for worker in crew.workers:
                worker.wait()
    return _outcome(crew, store, words or sys.stderr)


def _require(command: list[str], workers: int) -> None:
    if workers < 1:
        raise InputError("at least one worker", workers, "ask for one for every rank of the schedule")
    most = available() // LIGHTEST
    if workers > most:
        raise InputError(f"at most {most} workers, for which this host has memory", workers, "ask for fewer")
    if not command or shutil.which(command[0]) is None:
        raise InputError("a command that can be run", " ".join(command) or "none", "check its name and PATH")


def _start(command: list[str], rank: int, size: int, port: int, words: TextIO | None) -> subprocess.Popen[bytes]:
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
    }
    env.pop("TORCHELASTIC_RUN_ID", None)
    born = [sys.executable, "-I", "-S", "-c", BECOME, str(os.getpid()), *command]
    # A process group of its own: Ctrl-C then comes to the launcher alone, which passes it on once.
    return subprocess.Popen(born, env=env, stdin=subprocess.DEVNULL, stdout=words, stderr=words, process_group=0)


@contextmanager
def _holding_store(listener: socket.socket) -> Iterator[list[TCPStore]]:
    """The store, once torch is there. The workers start meanwhile: what they ask waits at the port."""
    store: list[TCPStore] = []

    def hold() -> None:
        from torch._C._distributed_c10d import TCPStore

        port = listener.getsockname()[1]
        fd = listener.detach()
        store.append(TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd))

    thread = threading.Thread(target=hold, name="penstock-store")
    thread.start()
    try:
        yield store
    finally:
        thread.join()  # torch half loaded is nothing to leave with


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
    poll, ranks = select.poll(), {}
    for rank, worker in enumerate(crew.workers):
        ranks[os.pidfd_open(worker.pid)] = rank
    for fd in ranks:
        poll.register(fd, select.POLLIN)
    until: float | None = None
    while len(crew.codes) < len(crew.workers) and (until is None or monotonic() < until):
        for fd, _ in poll.poll(TICK):
            rank = ranks[fd]
            poll.unregister(fd)
            crew.codes[rank] = _bury(crew.workers[rank])
        if until is None and (crew.signals or any(crew.codes.values())):
            until = monotonic() + (HASTE if crew.signals else GRACE)
    for fd in ranks:
        os.close(fd)


def _bury(worker: subprocess.Popen[bytes]) -> int:
    """The code of a worker that has ended; what a failed one had started ends too, while its number is still taken."""
    end = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    if end is not None and (end.si_code != os.CLD_EXITED or end.si_status):
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
    return worker.wait()


def _outcome(crew: Crew, store: list[TCPStore], out: TextIO) -> int:
    if crew.signals:
        return 128 + crew.signals[0]
    failed = {rank: code for rank, code in crew.codes.items() if code}
    late = sorted(crew.killed - set(crew.codes))
    if not failed and not late:
        return 0
    told = _told(store)
    rank = _first(failed, told)
    code = failed[rank]
    print(f"penstock: {_words(rank, code, told)}", file=out, flush=True)
    if late:
        who = ", ".join(map(str, late))
        print(f"penstock: still running {GRACE:.1f} s later, and ended: rank {who}", file=out, flush=True)
    return code if code > 0 else 128 - code


def _first(failed: dict[int, int], told: Failure | None) -> int:
    """The rank at fault: as the ranks say; else one that a signal has ended; else the first to end."""
    if told is not None and told.rank in failed:
        return told.rank
    return next((rank for rank, code in failed.items() if code < 0), next(iter(failed)))


def _words(rank: int, code: int, told: Failure | None) -> str:
    if told is not None and rank in told.silent:
        return f"rank {rank} gave no sign of life and was ended"
    if code >= 0:
        return f"rank {rank} ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    why = ", possibly out of memory" if -code == signal.SIGKILL else ""
    return f"rank {rank} ended by signal {-code} ({name}){why}"


def _told(store: list[TCPStore]) -> Failure | None:
    """What the ranks have said about it."""
    from torch._C._distributed_c10d import PrefixStore

    from penstock.engine.watch.courier import FAILURE
    from penstock.engine.watch.failure import Failure

    if not store:
        return None
    mine = PrefixStore("penstock/0", store[0])
    return Failure.decode(mine.get(FAILURE)) if mine.check([FAILURE]) else None
