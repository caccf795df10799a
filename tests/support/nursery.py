"""Processes without the wait for torch: one process loads it, and forks whatever a test wants to start.

A rank needs seconds to import torch, and the tests start hundreds of them. What is forked here is a process like any
other: its script is its `__main__`, at the bottom of its stack, and it ends as an interpreter ends. A launcher is one
too, and its ranks are its children; they were forked before it has begun, and start when it starts them. Tests of how
a launcher starts programs, and of torchrun, start them for real.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)
TESTS = next(folder for folder in Path(__file__).parents if folder.name == "tests")
# Scripts that tests start find what tests share, as the tests do.
PYTHONPATH = os.pathsep.join(filter(None, [str(TESTS), str(TESTS / "support"), os.environ.get("PYTHONPATH")]))
SERVER = f"import sys; sys.path.insert(0, {HERE!r}); import nursery; exec(nursery.serve(int(sys.argv[1])))"
LAUNCH = "import sys; from penstock.app.run.launcher import launch; sys.exit(launch(sys.argv[2:], int(sys.argv[1])))"
GONE = -1 << 15  # told in place of a code: the process is no more


class Started:
    """A forked process; what subprocess.Popen would say of it."""

    def __init__(self, pid: int, end: int) -> None:
        self.pid, self._end = pid, end
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready, _, _ = select.select([self._end], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self.returncode = _read_number(self._end)
            os.close(self._end)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start(
    argv: list[str],
    env: dict[str, str],
    out: int,
    err: int,
    *,
    ranks: int = 0,
    cwd: Path | None = None,
    modules: tuple[str, ...] = (),
    namespace: str = "",
) -> Started:
    """Run a Python script (`argv[0]`), or a module (behind `-m`), its output into two files. With `ranks`: a script
    under penstock's launcher, or a module that launches so many. `modules` are loaded once, for this process and all
    that come after it; `namespace` is the network it is put into."""
    asked = {"argv": argv, "env": env, "ranks": ranks, "cwd": str(cwd or Path.cwd())}
    asked |= {"modules": modules, "namespace": namespace}
    reader, writer = os.pipe()
    try:
        socket.send_fds(_server(), [json.dumps(asked).encode()], [out, err, writer])
    finally:
        os.close(writer)
    return Started(_read_number(reader), reader)


@cache
def _server() -> socket.socket:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    away = ("TORCHELASTIC", "GLOO", "RANK", "WORLD_SIZE", "MASTER_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(away)}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(theirs.fileno())],
        env={**env, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        process_group=0,  # a Ctrl-C of the terminal is for the tests
    )
    theirs.close()
    atexit.register(_end, mine, server)
    return mine


def _end(channel: socket.socket, server: subprocess.Popen[bytes]) -> None:
    channel.close()  # which it sees
    server.wait()


def _read_number(fd: int) -> int:
    data = os.read(fd, 4)
    return array.array("i", data)[0] if len(data) == 4 else GONE


def _write_number(fd: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the test has gone
        os.write(fd, array.array("i", [number]).tobytes())


# -- in the process that forks ----------------------------------------------------------------------------------------


@dataclass
class Asked:
    argv: list[str]
    env: dict[str, str]
    ranks: int
    cwd: str
    modules: list[str]
    namespace: str
    fds: list[int] = field(default_factory=list)


def serve(channel: int) -> types.CodeType:
    """Fork what is asked for. Returns in the forked processes alone: what they are to run."""
    _load()
    asked = _forked(socket.socket(fileno=channel))
    os.dup2(asked.fds[0], 1)
    os.dup2(asked.fds[1], 2)
    for fd in asked.fds:
        os.close(fd)
    os.chdir(asked.cwd)
    os.environ.clear()
    os.environ.update(asked.env)
    if asked.namespace:
        _move_to(asked.namespace)
    if not asked.ranks:
        return _script(asked.argv)
    crew: list[_Rank] = []
    for _ in range(asked.ranks):
        one = _rank(crew)
        if isinstance(one, types.CodeType):
            return one
        crew.append(one)
    return _launcher(crew, asked)


def _move_to(namespace: str) -> None:
    """As `ip netns exec` would."""
    with Path("/var/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _load() -> None:
    import penstock

    _ = penstock.Pipeline
    _import(
        "penstock.training.checkpoint.save_load",
        "penstock.app.run.launcher",
        "penstock.comm.transport.open",
        "penstock.models.gpt",
        "torch._dynamo",  # the first trace and the first step of an optimizer would load it
    )


def _import(*modules: str) -> None:
    if all(name in sys.modules for name in modules):
        return
    for name in modules:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"  # noqa: PTH208
    gc.collect()
    gc.freeze()


def _forked(channel: socket.socket) -> Asked:
    poll, ends = select.poll(), {}
    poll.register(channel, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != channel.fileno():
                poll.unregister(fd)
                pid, told = ends.pop(fd)
                _write_number(told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(fd)
                os.close(told)
                continue
            data, fds, _, _ = socket.recv_fds(channel, 1 << 20, 3)
            if not data:  # the tests are over
                os._exit(0)
            asked = Asked(**json.loads(data), fds=list(fds))
            _import(*asked.modules)
            pid = os.fork()
            if not pid:
                os.setpgid(0, 0)
                channel.close()
                for end, (_, told) in ends.items():
                    os.close(end)
                    os.close(told)
                return asked
            _write_number(fds[2], pid)
            for fd in fds[:2]:
                os.close(fd)
            end = os.pidfd_open(pid)
            ends[end] = pid, fds[2]
            poll.register(end, select.POLLIN)


def _script(argv: list[str]) -> types.CodeType:
    """What the interpreter does with a script, or with `-m` and a module, and its arguments."""
    import __main__

    if argv[0] == "-m":
        sys.argv[:] = argv[1:]
        sys.path[0] = str(Path.cwd())
        return compile(f"import runpy; runpy.run_module({argv[1]!r}, None, '__main__', True)", "<module>", "exec")
    script = argv[0]
    sys.argv[:] = argv
    sys.path[0] = str(Path(script).resolve().parent)
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    __main__.__file__ = script
    return compile(Path(script).read_bytes(), script, "exec")


# -- in a launcher and its ranks --------------------------------------------------------------------------------------


@dataclass
class _Rank:
    """A rank that waits to be started, as its launcher sees it."""

    pid: int
    go: int
    returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _rank(before: list[_Rank]) -> _Rank | types.CodeType:
    launcher, (go, tell) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(go)
        return _Rank(pid, tell)
    for fd in (tell, *(rank.go for rank in before)):
        os.close(fd)
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
    os.setpgid(0, 0)
    told = b"".join(iter(lambda: os.read(go, 1 << 16), b""))
    os.close(go)
    if not told or os.getppid() != launcher:
        os._exit(1)
    command, env, words = json.loads(told)
    os.environ.clear()
    os.environ.update(env)
    if words:
        file = os.open(words, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    argv = command[command.index(sys.executable) + 1 :]
    if argv[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        argv = argv[2:]
    return _script(argv)


@contextmanager
def _held(listener: socket.socket) -> Iterator[None]:
    """The store, in a process that has torch."""
    from torch.distributed import TCPStore

    address, port = listener.getsockname()
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    yield
    del store


def _launcher(crew: list[_Rank], asked: Asked) -> types.CodeType:
    import penstock.app.run.launcher

    penstock.app.run.launcher.store_server = _held
    waiting = iter(crew)

    def handed(born: list[str], env: dict[str, str], stdout: Any, **_: Any) -> _Rank:
        rank, command = next(waiting), born[born.index("-c") + 3 :]  # behind the program that becomes the command
        words = f"/proc/{os.getpid()}/fd/{stdout.fileno()}" if stdout else ""
        with os.fdopen(rank.go, "wb") as go:
            go.write(json.dumps([command, env, words]).encode())
        return rank

    penstock.app.run.launcher.subprocess = types.SimpleNamespace(Popen=handed, DEVNULL=subprocess.DEVNULL)
    if asked.argv[0] == "-m":
        return _script(asked.argv)
    sys.argv[:] = ["-c", str(asked.ranks), sys.executable, "-W", "error", *asked.argv]
    return compile(LAUNCH, "<launcher>", "exec")
