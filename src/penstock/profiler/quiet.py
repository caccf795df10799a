"""Detect samples of a measurement that were disturbed by other processes or by the machine's host.

    with quiet_sample() as sample:
        work()
    if sample.quiet:
        keep()

A core that is neither idle nor running this process or its descendants runs another process. The kernel reports idle
time with a resolution of a hundredth of a second, so a sample should last at least a quarter of a second. Where the
kernel reports none, all samples count as quiet.
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
    """Seconds of a sample, and CPU seconds of other processes during it, known when its context ends."""

    seconds: float = 0.0
    foreign: float = 0.0
    allowed: float = 0.05  # share of the sample

    @property
    def quiet(self) -> bool:
        return self.foreign <= RESOLUTION + self.allowed * self.seconds


@contextmanager
def quiet_sample(allowed: float = 0.05, root: int | None = None) -> Iterator[Sample]:
    """Measure whether other processes run meanwhile. `allowed` is the share of the sample, in seconds of one core, that
    others may use. The descendants of `root`, by default this process, are not others."""
    sample, has_stat = Sample(allowed=allowed), _STAT.exists()
    used, idle = (process_tree_seconds(root), idle_seconds()) if has_stat else (0.0, 0.0)
    begin = time.perf_counter()
    try:
        yield sample
    finally:
        sample.seconds = time.perf_counter() - begin
        if has_stat:
            busy = sample.seconds * cores() - (idle_seconds() - idle)
            sample.foreign = busy - (process_tree_seconds(root) - used)


def cores() -> int:
    return os.sysconf("SC_NPROCESSORS_ONLN")


def idle_seconds() -> float:
    """Return the idle seconds of all cores since the machine started, waiting for disks included."""
    with _STAT.open() as file:
        fields = file.readline().split()
    return (int(fields[4]) + int(fields[5])) * TICK


def process_tree_seconds(root: int | None = None) -> float:
    """Return the CPU seconds of a process (this one) and all its descendants; those that have ended count once they
    were waited for."""
    parents: dict[int, int] = {}
    ended: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
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
