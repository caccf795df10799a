"""Processes as the ranks of a run, on this host or on two hosts that are made of network namespaces (root only).

They are forked from a process that has torch loaded (see nursery), unless a test wants programs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import IO

import nursery


@dataclass(frozen=True)
class Host:
    """Where ranks live: a network namespace with an address, or this host itself."""

    namespace: str = ""
    interface: str = ""
    address: str = "127.0.0.1"
    nccl: str = ""  # what NCCL is told to take for the host

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []

    @property
    def environment(self) -> dict[str, str]:
        gloo = {"GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}
        nccl = {"NCCL_HOSTID": self.nccl, "NCCL_SOCKET_IFNAME": self.interface or "lo"} if self.nccl else {}
        return gloo | nccl


HERE = Host()


@dataclass
class Rank:
    """A process, the files that it writes to, and once it has ended what it said."""

    process: subprocess.Popen[bytes] | nursery.Started
    files: tuple[IO[str], IO[str]]
    out: str = ""
    error: str = ""

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def read(self) -> None:
        for file in self.files:
            file.seek(0)
        self.out, self.error = (file.read() for file in self.files)


@dataclass
class Ranks:
    """Processes that run one script together. Leaving the block kills what is left of them."""

    fork: bool = True
    ranks: list[Rank] = field(default_factory=list)

    def start(self, argv: list[str], hosts: list[Host], **environment: str) -> None:
        """One rank a host given: `[HERE] * 4` are four on this host."""
        port = str(free_port())
        for rank, host in enumerate(hosts):
            env = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": nursery.PYTHONPATH,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts)),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": port,
                **host.environment,
                **environment,
            }
            self.ranks.append(self._begun(argv, host, env))

    def _begun(self, argv: list[str], host: Host, env: dict[str, str]) -> Rank:
        out, err = files = (TemporaryFile("w+"), TemporaryFile("w+"))  # noqa: SIM115  # read when the rank has ended
        if self.fork:
            return Rank(nursery.start(argv, env, out.fileno(), err.fileno(), namespace=host.namespace), files)
        command = [*host.prefix, sys.executable, *argv]
        return Rank(subprocess.Popen(command, env=env, stdout=out, stderr=err), files)

    def wait(self, limit: float) -> list[Rank]:
        """Until all have ended; those that have not by then are killed (code -9)."""
        end = time.monotonic() + limit
        for rank in self.ranks:
            late = ""
            try:
                rank.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait(10)
                late = "\nkilled: too slow"
            rank.read()
            rank.error += late
        return self.ranks

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.kill()
                rank.process.wait(10)
            for file in rank.files:
                file.close()


def run(argv: list[str], hosts: list[Host], limit: float = 60.0, fork: bool = True, **environment: str) -> list[Rank]:
    """Start, wait, and demand that every rank exits with 0 and without a word of complaint."""
    with Ranks(fork) as ranks:
        ranks.start(argv, hosts, **environment)
        for number, rank in enumerate(ranks.wait(limit)):
            assert rank.code == 0, f"rank {number} exited with {rank.code}\n{rank.out}\n{rank.error}"
            assert "terminate called" not in rank.error, rank.error
        return ranks.ranks


def free_port() -> int:
    """One that nobody has right now; in a namespace they are all free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def can_make_hosts() -> bool:
    """Whether network namespaces can be made here."""
    probe = f"penstock-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two network namespaces that reach each other over one cable, and nothing else."""
    mark = f"{os.getpid() % 10**5}"
    a = Host(f"penstock-{mark}-a", f"ps{mark}a", "10.213.77.1")
    b = Host(f"penstock-{mark}-b", f"ps{mark}b", "10.213.77.2")
    try:
        for host in (a, b):
            _ip("netns", "add", host.namespace)
        _ip("link", "add", a.interface, "netns", a.namespace, "type", "veth", "peer", b.interface, "netns", b.namespace)
        for host in (a, b):
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield a, b
    finally:
        for host in (a, b):
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)
