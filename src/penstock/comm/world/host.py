"""The host of a process, its cores, and the network interface that leads to other hosts."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import uuid
from pathlib import Path

MAC = sys.platform == "darwin"
_SIOCGIFADDR = 0xC0206921 if MAC else 0x8915
LOOPBACK = "lo0" if MAC else "lo"
BOOT = Path("/proc/sys/kernel/random/boot_id")


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def identity() -> str:
    """Return a string that is equal for two processes if they can share memory, see each other's process IDs, and
    connect over loopback."""
    if not BOOT.exists():
        return f"{socket.gethostname()}/{uuid.getnode()}"
    boot = BOOT.read_text().strip()
    spaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("net", "pid")]
    return "/".join([boot, *map(str, spaces)])


def interface_to(address: str, port: int) -> str | None:
    """Return the network interface through which an address is reached, or None where it cannot be determined."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))  # sends nothing
            own_address = probe.getsockname()[0]
            if own_address.startswith("127."):
                return LOOPBACK
            names = [name for _, name in socket.if_nameindex() if _address(probe, name) == own_address]
    except OSError:
        return None
    return names[0] if names else None


def _address(probe: socket.socket, name: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
