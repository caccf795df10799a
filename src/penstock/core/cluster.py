"""The machines: devices in nested groups, and what joins them.

Level 0 joins the devices of one host, level 1 the hosts, and so on. Two devices meet at the lowest level whose group
holds both. At a level that is `shared`, all traffic that leaves or enters a group passes one full-duplex uplink and
waits its turn there; elsewhere every pair of devices has a link of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite, prod
from typing import Any

from penstock.core.given import from_json_of
from penstock.errors import InputError


@dataclass(frozen=True)
class Device:
    """One kind of device: bytes of memory, and its speed as a multiple of the one that was profiled."""

    kind: str = "device"
    memory: float = float("inf")
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not (self.memory > 0 and self.speed > 0 and isfinite(self.speed)):
            raise InputError(
                f"positive memory and speed of device {self.kind!r}", (self.memory, self.speed), "correct the device"
            )


@dataclass(frozen=True)
class Level:
    """`size` groups of the level below are joined at `bandwidth` bytes/s (each way) and `latency` seconds."""

    name: str
    size: int
    bandwidth: float
    latency: float = 0.0
    reduce_bandwidth: float | None = None  # all-reduce may see another figure than a single transfer
    shared: bool = False
    reduce_rings: bool = False  # `reduce_bandwidth` is that of two members; n of them run n // 2 rings at once

    def reduce_rate(self, members: int) -> float:
        """Bytes/s that an all-reduce over so many members sees."""
        rate = self.bandwidth if self.reduce_bandwidth is None else self.reduce_bandwidth
        return rate * max(1, members // 2) if self.reduce_rings else rate

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError(f"level {self.name!r} to join at least 1 group", self.size, "change size")
        rates = (self.bandwidth, self.bandwidth if self.reduce_bandwidth is None else self.reduce_bandwidth)
        if not all(rate > 0 for rate in rates):
            raise InputError(f"positive bandwidths at level {self.name!r}", rates, "change bandwidth")
        if not (isfinite(self.latency) and self.latency >= 0):
            raise InputError(f"a latency of 0 or more seconds at level {self.name!r}", self.latency, "change latency")


@dataclass(frozen=True)
class Cluster:
    """Devices numbered host by host, and the levels that join them, innermost first."""

    devices: tuple[Device, ...]
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        room = prod(level.size for level in self.levels)
        if len(self.devices) != room:
            raise InputError(f"{room} devices, the product of the level sizes", len(self.devices), "make them agree")

    @classmethod
    def uniform(cls, levels: tuple[Level, ...], device: Device | None = None) -> Cluster:
        """Equal devices throughout."""
        return cls((device or Device(),) * prod(level.size for level in levels), levels)

    def group(self, device: int, level: int) -> int:
        """The group of `level` sizes that holds a device; at level 0 the device itself."""
        return device // prod(lower.size for lower in self.levels[:level])

    def meeting_level(self, a: int, b: int) -> int:
        """The lowest level whose group holds both devices."""
        for level in range(len(self.levels)):
            if self.group(a, level + 1) == self.group(b, level + 1):
                return level
        raise InputError(f"devices below {len(self.devices)}", (a, b), "correct the device numbers")

    def to_json(self) -> dict[str, Any]:
        return {"devices": [asdict(d) for d in self.devices], "levels": [asdict(level) for level in self.levels]}

    @classmethod
    @from_json_of("cluster")
    def from_json(cls, data: dict[str, Any]) -> Cluster:
        return cls(tuple(Device(**d) for d in data["devices"]), tuple(Level(**level) for level in data["levels"]))
