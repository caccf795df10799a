"""The devices of this host: CUDA devices where there are some, else workers that share its cores and its memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from penstock.core.cluster import Device
from penstock.engine.host import cores
from penstock.engine.transport.memory import available
from penstock.errors import InputError

CGROUP = Path("/sys/fs/cgroup")
COPIED = 64 << 20  # bytes, to learn the speed of the way to host memory
TIMES = 9


def count_devices(wanted: int | None) -> int:
    """How many to describe: all CUDA devices, or a worker for each core, unless said otherwise."""
    if not torch.cuda.is_available():
        return cores() if wanted is None else wanted
    here = torch.cuda.device_count()
    if wanted is not None and wanted > here:
        raise InputError(f"at most the {here} CUDA devices of this host", wanted, "ask for fewer devices")
    return here if wanted is None else wanted


def device_of(local: int) -> torch.device:
    """The device of a host's rank."""
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
    """A device; where it is the host itself, one of so many workers that share its memory."""
    if device.type == "cpu":
        return Device("cpu", float(host_memory() // sharing))
    kind = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    memory = torch.cuda.get_device_properties(device).total_memory
    return Device(kind, float(memory), host_bandwidth=float(f"{host_bandwidth(device):.4g}"))


def host_memory() -> int:
    """Bytes that this process and others like it can have: what is free here, or what its control group allows."""
    try:
        most = int((CGROUP / "memory.max").read_text())
        return min(available(), most - int((CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return available()


def host_bandwidth(device: torch.device) -> float:
    """Bytes/s of the slower way between a CUDA device and pinned host memory."""
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
