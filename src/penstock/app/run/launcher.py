"""Start the ranks of a run as processes of this host, and end them together.

The environment is that of torchrun. The store listens on a loopback port that the launcher has opened. It runs in a
process of its own, because torch takes seconds to load, during which a process handles no signal. The launcher creates
the status page of each rank, so that it can report what a rank was doing after all have ended. A worker asks the kernel
to end it with the launcher before it executes the command.
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
from penstock.comm.watch.status import PageField, RankState, SharedFile, StatusPageReader
from penstock.errors import InputError

# argv: address, port, and the descriptor of the listening socket. It ends when the launcher closes its input.
STORE_SERVER = """
import os, sys
from torch._C._distributed_c10d import TCPStore
address, port, fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
os.read(0, 1)
os._exit(0)
"""


@contextmanager
def store_server(listener: socket.socket) -> Iterator[None]:
    """Run the store on a listening socket. Ranks may start before it is ready: their connections wait in the socket."""
    address, port = listener.getsockname()[:2]
    arguments = [sys.executable, "-c", STORE_SERVER, address, str(port), str(listener.fileno())]
    fds = (listener.fileno(),)
    # In its own process group, so that Ctrl-C reaches the launcher alone.
    holder = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=fds, process_group=0
    )
    listener.close()
    try:
        yield
    finally:
        holder.kill()
        holder.communicate()


GRACE = 4.4  # seconds within which the others have to end after the first failure, so that all end within five
HASTE = 3.5  # the same after Ctrl-C
TICK = 100  # milliseconds
LOOPBACK = "127.0.0.1"
LIGHTEST = 64 << 20  # bytes that a worker needs at least; more than twice that with torch

# argv: the launcher's process ID, then the command. Python ignores two signals, whose default action is restored.
EXEC = """
import ctypes, os, signal, sys
ask = getattr(ctypes.CDLL(None), "prctl", None)  # None except on Linux: there the ranks poll
if ask is not None:
    ask(1, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass
class WorkerProcesses:
    """The workers that were started; `codes` of those that have ended, in that order."""

    status_files: list[SharedFile] = field(default_factory=list)
    pages: list[StatusPageReader] = field(default_factory=list)  # readers of the status files
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)  # received by the launcher
    killed: set[int] = field(default_factory=set)  # by the launcher
    folders: set[Path] = field(default_factory=set)  # socket directories of processes that were sent signals

    def send(self, number: int) -> None:
        """Send a signal to every running worker and its child processes."""
        for rank in range(len(self.workers)):
            if rank not in self.codes:
                self._signal(rank, number)

    def end_unjoined(self) -> None:
        """After a failure, end the ranks that have not joined yet, and notify those that are joining: other ranks
        cannot."""
        lost = next(rank for rank, code in self.codes.items() if code)
        for rank, page in enumerate(self.pages):
            if rank not in self.codes and page.blank:
                self.killed.add(rank)
                self._signal(rank, signal.SIGTERM)
            elif rank not in self.codes:
                os.pwrite(self.status_files[rank].fd, (lost + 1).to_bytes(8, sys.byteorder), 8 * PageField.GONE)

    def _signal(self, rank: int, number: int) -> None:
        group = self.workers[rank].pid
        self.folders |= socket_folders.socket_folders(group)
        if number == signal.SIGKILL:
            self.killed.add(rank)
        with suppress(ProcessLookupError):
            os.killpg(group, number)

    def close(self) -> None:
        for file, page in zip(self.status_files, self.pages, strict=True):
            file.unlink()
            os.close(file.fd)
            os.close(page.fd)
        socket_folders.remove(self.folders)


def launch(command: list[str], workers: int, output: TextIO | None = None) -> int:
    """Run `command` as that many ranks. Return 0, or the exit code of the rank that failed first (128 + signal).

    `output` is a file for the output of the ranks and the launcher; by default this process's standard streams.
    """
    _require(command, workers)
    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    port, processes = int(listener.getsockname()[1]), WorkerProcesses()
    try:
        for rank in range(workers):
            processes.status_files.append(status.create_page(rank))
            processes.pages.append(StatusPageReader(processes.status_files[rank].fd))
        with _forward_signals(processes), store_server(listener):
            try:
                for rank in range(workers):
                    processes.workers.append(
                        _start(command, rank, workers, port, processes.status_files[rank].path, output)
                    )
                _wait(processes)
            finally:
                processes.send(signal.SIGKILL)
                for worker in processes.workers:
                    worker.wait()
        return _outcome(processes, output or sys.stderr)
    finally:
        processes.close()


def _require(command: list[str], workers: int) -> None:
    if workers < 1:
        raise InputError("at least one worker", workers, "ask for one for every rank of the schedule")
    most = available() // LIGHTEST
    if workers > most:
        raise InputError(f"at most {most} workers, for which this host has memory", workers, "ask for fewer")
    if not command or shutil.which(command[0]) is None:
        raise InputError("a command that can be run", " ".join(command) or "none", "check its name and PATH")


def _start(
    command: list[str], rank: int, size: int, port: int, page: str, output: TextIO | None
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
    arguments = [sys.executable, "-I", "-S", "-c", EXEC, str(os.getpid()), *command]
    # In its own process group: Ctrl-C reaches the launcher alone, which forwards it once.
    return subprocess.Popen(arguments, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0)


@contextmanager
def _forward_signals(processes: WorkerProcesses) -> Iterator[None]:
    """Forward the first signal that ends the launcher to its workers; a second one kills them."""

    def handler(number: int, frame: FrameType | None) -> None:
        processes.signals.append(number)
        processes.send(number if len(processes.signals) == 1 else signal.SIGKILL)

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


def _wait(processes: WorkerProcesses) -> None:
    """Wait until all workers have ended, or the time after the first failure is over."""
    ends, until = _Ends(processes.workers), None
    while len(processes.codes) < len(processes.workers) and (until is None or monotonic() < until):
        for rank in ends.wait():
            processes.codes[rank] = _reap(processes, rank)
        if until is None and (processes.signals or any(processes.codes.values())):
            until = monotonic() + (HASTE if processes.signals else GRACE)
            if not processes.signals:
                processes.end_unjoined()
    ends.close()


class _Ends:
    """Detection of ended workers: notified by the kernel, or polled ten times a second."""

    def __init__(self, workers: list[subprocess.Popen[bytes]]) -> None:
        self.left = dict(enumerate(workers))
        self.ranks: dict[int, int] = {}
        self.poll = select.poll()
        if hasattr(os, "pidfd_open"):
            self.ranks = {os.pidfd_open(worker.pid): rank for rank, worker in self.left.items()}
        for fd in self.ranks:
            self.poll.register(fd, select.POLLIN)

    def wait(self) -> list[int]:
        """Return the workers that have ended since the last call, after at most one tick."""
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


def _reap(processes: WorkerProcesses, rank: int) -> int:
    """Return the exit code of a worker that has ended. If it failed, kill its process group while its ID is still
    reserved."""
    worker, failed = processes.workers[rank], True
    if hasattr(os, "waitid"):
        end = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        failed = end is not None and (end.si_code != os.CLD_EXITED or end.si_status != 0)
    else:
        failed = worker.wait() != 0
    if failed:
        processes.folders |= socket_folders.socket_folders(worker.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
    return worker.wait()


def _outcome(processes: WorkerProcesses, out: TextIO) -> int:
    if processes.signals:
        return 128 + processes.signals[0]
    late = sorted(processes.killed - set(processes.codes))
    if not any(processes.codes.values()) and not late:
        return 0
    failure = _first_failure(processes.pages)
    rank = _failed_rank(processes, failure)
    print(
        f"penstock: {_describe_end(rank, processes.codes[rank], failure, processes.pages[rank])}", file=out, flush=True
    )
    if late:
        who = ", ".join(map(str, late))
        print(f"penstock: still running {GRACE:.1f} s later, and ended: rank {who}", file=out, flush=True)
    code = processes.codes[rank] or next(code for code in processes.codes.values() if code)
    return code if code > 0 else 128 - code


def _failed_rank(processes: WorkerProcesses, failure: Failure | None) -> int:
    """Return the rank at fault: as the ranks report, else one that a signal has ended, else the first to fail."""
    if failure is not None and failure.rank in processes.codes:
        return failure.rank
    failed = {rank: code for rank, code in processes.codes.items() if code and rank not in processes.killed}
    return next((rank for rank, code in failed.items() if code < 0), next(iter(failed)))


def _describe_end(rank: int, code: int, failure: Failure | None, page: StatusPageReader) -> str:
    if failure is not None and rank in failure.silent:
        return f"rank {rank} sent no heartbeat and was killed"
    amid = page.state in (RankState.STARTING, RankState.RUNNING) and not page.blank  # it has ended without a report
    place = f" {page.place}" if amid else ""
    if code == 0:
        why = ": does its code call os._exit?" if amid else ""
        return f"rank {rank} left with code 0{place}, while other ranks still waited for it{why}"
    if code > 0:
        return f"rank {rank} ended with code {code}{place}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    why = ", possibly out of memory" if -code == signal.SIGKILL else ""
    if page.blank:
        place = " before it joined the others"
    return f"rank {rank} ended by signal {-code} ({name}){why}{',' if place else ''}{place}"


def _first_failure(pages: list[StatusPageReader]) -> Failure | None:
    """Return the failure that a rank reported first; None if there is none."""
    failed = [page for page in pages if page.state == RankState.FAILED]
    return Failure.decode(min(failed, key=lambda page: page[PageField.TOLD_AT]).report()) if failed else None
