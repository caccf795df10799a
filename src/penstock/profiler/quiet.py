"""Which samples of a measurement were disturbed: other processes, or the machine's host, used the cores meanwhile.

    with quiet_sample() as sample:
        work()
    if sample.quiet:
        keep()

A core that is not idle and does not run this process or a descendant of it runs somebody else. The kernel tells idle
time to a hundredth of a second, so a sample should last a quarter of a second or more. Where the kernel does not tell,
all is quiet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TICK = 1 / os.sysconf("SC_CLK_TCK")
_STAT = Path("/proc/stat")
RESOLUTION = 2 * TICK  # of the difference of two readings of idle time, rounded down on each of a few cores


@dataclass
class Sample:
    """What is known when its context ends: seconds in all, and seconds of some core that went to others."""

    seconds: float = 0.0
    foreign: float = 0.0
    allowed: float = 0.05  # share of the sample

    @property
    def quiet(self) -> bool:
        return self.foreign <= RESOLUTION + self.allowed * self.seconds


@contextmanager
def quiet_sample(allowed: float = 0.05, root: int | None = None) -> Iterator[Sample]:
    """`allowed` is the share of the sample, in seconds of one core, that others may use. `root` is the process whose
    descendants are no strangers, if it is another than this one."""
    sample, told = Sample(allowed=allowed), _STAT.exists()
    used, idle = (family_seconds(root), idle_seconds()) if told else (0.0, 0.0)
    begin = time.perf_counter()
    try:
        yield sample
    finally:
        sample.seconds = time.perf_counter() - begin
        if told:
            busy = sample.seconds * cores() - (idle_seconds() - idle)
            sample.foreign = busy - (family_seconds(root) - used)


def cores() -> int:
    return os.sysconf("SC_NPROCESSORS_ONLN")


def idle_seconds() -> float:
    """Of all cores together since the machine started, waiting for disks included."""
    with _STAT.open() as file:
        fields = file.readline().split()
    return (int(fields[4]) + int(fields[5])) * TICK


def family_seconds(root: int | None = None) -> float:
    """CPU seconds of a process (this one) and all its descendants, ended ones included once they are waited for."""
    parents: dict[int, int] = {}
    ended: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # ended while we looked
                continue
            parents[int(entry.name)] = int(fields[1])
            ended[int(entry.name)] = (int(fields[13]) + int(fields[14])) * TICK
    family = {os.getpid() if root is None else root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(_clock(pid) + ended.get(pid, 0.0) for pid in family)


def _clock(pid: int) -> float:
    try:
        return time.clock_gettime((~pid << 3) | 2)  # how Linux names the CPU clock of a whole process
    except OSError:
        return 0.0
