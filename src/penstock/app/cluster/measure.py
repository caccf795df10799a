"""Measure a cluster: the devices of all ranks, and the links between them.

A device is a CUDA device where there are some, else a worker that shares its host's cores and memory. Links within a
host are measured between its first two ranks, links between hosts between the first ranks of the first two hosts, and
all-reduces over all ranks.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from penstock.app.cluster.probe import Fit, Probe
from penstock.comm.transport.shared.mapping import available
from penstock.comm.world.host import cores
from penstock.comm.world.world import World
from penstock.core.cluster import Cluster, Device, Level
from penstock.core.cluster_toml import to_toml
from penstock.errors import InputError

CGROUP = Path("/sys/fs/cgroup")
COPIED = 64 << 20  # bytes copied to measure the bandwidth to host memory
TIMES = 9


def count_devices(requested: int | None) -> int:
    """Return how many devices to describe: by default all CUDA devices, or a worker for each core."""
    if not torch.cuda.is_available():
        return cores() if requested is None else requested
    here = torch.cuda.device_count()
    if requested is not None and requested > here:
        raise InputError(f"at most the {here} CUDA devices of this host", requested, "ask for fewer devices")
    return here if requested is None else requested


def device_of(local: int) -> torch.device:
    """Return the device of a rank by its number on the host."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local >= torch.cuda.device_count():
        raise InputError(
            f"at most {torch.cuda.device_count()} ranks on a host, one a CUDA device", local + 1, "launch fewer"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def describe(device: torch.device, sharing: int) -> Device:
    """Return the description of a device; for a CPU, of one of `sharing` workers that share the host's memory."""
    if device.type == "cpu":
        return Device("cpu", float(host_memory() // sharing))
    kind = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    memory = torch.cuda.get_device_properties(device).total_memory
    return Device(kind, float(memory), host_bandwidth=float(f"{host_bandwidth(device):.4g}"))


def host_memory() -> int:
    """Return the bytes that processes on this host can use: the free memory, or the limit of the control group."""
    try:
        most = int((CGROUP / "memory.max").read_text())
        return min(available(), most - int((CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return available()


def host_bandwidth(device: torch.device) -> float:
    """Return the bytes/s between a CUDA device and pinned host memory, in the slower direction."""
    there = torch.empty(COPIED, dtype=torch.uint8, device=device)
    here = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    return COPIED / max(_seconds(lambda: there.copy_(here), device), _seconds(lambda: here.copy_(there), device))


def _seconds(copy: Callable[[], object], device: torch.device) -> float:
    spent = []
    for _ in range(TIMES):
        began = perf_counter()
        copy()
        torch.cuda.synchronize(device)
        spent.append(perf_counter() - began)
    return median(spent)


@dataclass(frozen=True)
class MeasuredCluster:
    """A cluster, and the fitted lines behind its figures, by (level, operation)."""

    cluster: Cluster
    fits: dict[tuple[str, str], Fit]

    @property
    def doubts(self) -> list[str]:
        return [f"{level}, {what}: {doubt}" for (level, what), one in self.fits.items() for doubt in one.doubts]

    def to_json(self) -> dict[str, Any]:
        """Return the cluster's JSON and the measurements."""
        lines = [{"level": level, "what": what, **one.to_json()} for (level, what), one in self.fits.items()]
        return {**self.cluster.to_json(), "measured": lines}

    def to_toml(self) -> str:
        notes = [f"measured by `penstock cluster measure` with torch {torch.__version__}"]
        for (level, what), one in self.fits.items():
            small, large = min(one.medians), max(one.medians)
            ends = (f"{_size(size)} took {one.medians[size]:.3g} s" for size in (small, large))
            notes.append(f"{level}, {what}: {', '.join(ends)}; the middle half within {one.spread:.0%}")
        if not self.fits:
            notes.append("one device: no link to measure")
        return to_toml(self.cluster, [*notes, *self.doubts])


def measure(world: World | None) -> MeasuredCluster:
    """Measure on all ranks. The result of rank 0 is valid."""
    if world is None:
        alone = describe(device_of(0), 1)
        return MeasuredCluster(Cluster((alone,), (Level("inside", 1, inf),)), {})
    hosts, size = hosts_of(world.hosts)
    device = device_of(world.rank % size)
    descriptions = world.gather(json.dumps(asdict(describe(device, size))).encode())
    devices = equalize([Device(**json.loads(one)) for one in descriptions])
    probe, fits = Probe(world, device), {}
    first_ranks = list(range(0, world.size, size))
    groups = {"inside": list(range(size)), "between": first_ranks}
    peers = [members[1] for members in groups.values() if len(members) > 1]
    probe.open(peers)
    for level, members in groups.items():
        if len(members) > 1:
            fits[level, "transfers"] = probe.transfer(1 + peers.index(members[1]), members[1])
            fits[level, f"all-reduce of {len(members)}"] = probe.all_reduce(members)
    copied_by_cpu = probe.lanes is not None and "shared" in probe.lanes.kinds.values()
    inside = replace(_level("inside", size, fits), blocking=copied_by_cpu)
    levels = [inside] + ([_level("between", hosts, fits)] if hosts > 1 else [])
    return MeasuredCluster(Cluster(devices, tuple(levels)), fits)


def hosts_of(names: tuple[str, ...]) -> tuple[int, int]:
    """Return the number of hosts and the ranks on each, from the host of every rank."""
    counts = Counter(names)
    size = counts[names[0]]
    if list(names) != [name for name in counts for _ in range(size)]:
        raise InputError(
            "the same number of ranks on every host, one after the other",
            f"{list(counts.values())} on {len(counts)} hosts",
            "launch as many on each, with torchrun",
        )
    return len(counts), size


def equalize(devices: list[Device]) -> tuple[Device, ...]:
    """Give all devices of a kind the smallest figures among them, since free memory differs each time."""
    kinds: dict[str, list[Device]] = {}
    for device in devices:
        kinds.setdefault(device.kind, []).append(device)
    return tuple(
        replace(
            device,
            memory=min(other.memory for other in kinds[device.kind]),
            host_bandwidth=min(other.host_bandwidth for other in kinds[device.kind]),
        )
        for device in devices
    )


def _level(name: str, size: int, fits: dict[tuple[str, str], Fit]) -> Level:
    if size == 1:
        return Level(name, 1, inf)
    sent, reduced = fits[name, "transfers"], fits[name, f"all-reduce of {size}"]
    figures = (sent.bandwidth, sent.latency, reduced.bandwidth, reduced.latency)
    bandwidth, latency, reduce_bandwidth, reduce_latency = (float(f"{figure:.4g}") for figure in figures)
    return Level(name, size, bandwidth, latency, reduce_bandwidth, reduce_latency=reduce_latency)


def _size(size: int) -> str:
    return f"{size >> 20} MB" if size >> 20 else f"{size >> 10} KB"
