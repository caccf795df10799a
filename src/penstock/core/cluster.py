"""A cluster: devices in nested groups, and the links between them.

Level 0 joins the devices of one host, level 1 the hosts, and so on. Two devices meet at the lowest level whose group
contains both. At a level that is `shared`, all traffic that leaves or enters a group is serialized on one full-duplex
uplink; at other levels every pair of devices has its own link.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import accumulate
from math import inf, prod
from operator import mul
from typing import Any

from penstock.core.arguments import named_fields
from penstock.core.validation import from_json_of, shown, sized, text, truth, whole
from penstock.errors import InputError

MOST_DEVICES = 1_000_000
SLOWEST = 1e-9  # smallest speed or bandwidth above 0: dividing by a smaller one may overflow
REDUCE = ("reduce_bandwidth", "inf")  # an unlimited one in JSON, where null means: the same as `bandwidth`


@named_fields
@dataclass(frozen=True)
class Device:
    """One kind of device: bytes of memory, and its speed as a multiple of the profiled device's.

    `host_bandwidth` is in bytes/s, each way, between the device and host memory; with 0, nothing can be offloaded.
    """

    kind: str = "device"
    memory: float = float("inf")
    speed: float = 1.0
    host_bandwidth: float = 0.0

    def __post_init__(self) -> None:
        text("the kind of a device", self.kind, "correct the device")
        for entry in fields(self)[1:]:
            least = 0.0 if entry.name == "memory" else SLOWEST
            what = f"{entry.name} of device {self.kind!r}"
            sized(what, getattr(self, entry.name), "correct the device", least)
        if not (self.memory > 0 and 0 < self.speed < inf):
            raise InputError(
                f"positive memory and speed of device {self.kind!r}", (self.memory, self.speed), "correct the device"
            )
        if not 0 <= self.host_bandwidth < inf:
            raise InputError(
                f"a host_bandwidth of 0 or more bytes/s of device {self.kind!r}",
                self.host_bandwidth,
                "correct the device",
            )


@named_fields
@dataclass(frozen=True)
class Level:
    """`size` groups of the level below are joined at `bandwidth` bytes/s (each way) and `latency` seconds."""

    name: str
    size: int
    bandwidth: float
    latency: float = 0.0
    reduce_bandwidth: float | None = None  # of an all-reduce, where it differs from that of a single transfer
    shared: bool = False
    reduce_rings: bool = False  # `reduce_bandwidth` is that of two members; n members run n // 2 rings at once
    reduce_latency: float | None = None  # seconds of one of its 2(n - 1) steps, where it differs from a transfer's
    blocking: bool = False  # the sender copies by itself and computes nothing meanwhile: shared memory

    def reduce_rate(self, members: int) -> float:
        """Return the bandwidth of an all-reduce over `members` devices, in bytes/s."""
        rate = self.bandwidth if self.reduce_bandwidth is None else self.reduce_bandwidth
        return rate * max(1, members // 2) if self.reduce_rings else rate

    @property
    def reduce_wait(self) -> float:
        """Latency of one step of an all-reduce, in seconds."""
        return self.latency if self.reduce_latency is None else self.reduce_latency

    def __post_init__(self) -> None:
        text("the name of a level", self.name, "correct the level")
        if isinstance(self.size, int) and self.size < 1:
            raise InputError(f"level {self.name!r} to join at least 1 group", self.size, "change size")
        whole(f"size of level {self.name!r}", self.size)
        for name in ("reduce_rings", "shared", "blocking"):
            truth(f"{name} of level {self.name!r}", getattr(self, name))
        self._require_figures()

    def _require_figures(self) -> None:
        """Require bandwidths above 0, latencies of 0 or more, and neither too large."""
        for name in ("bandwidth", "latency", "reduce_bandwidth", "reduce_latency"):
            value, least = getattr(self, name), SLOWEST if name.endswith("bandwidth") else 0.0
            if value is not None or not name.startswith("reduce"):
                sized(f"{name} of level {self.name!r}", value, f"change {name}", least)
        rates = (self.bandwidth, self.bandwidth if self.reduce_bandwidth is None else self.reduce_bandwidth)
        if not all(rate > 0 for rate in rates):
            raise InputError(f"positive bandwidths at level {self.name!r}", rates, "change bandwidth")
        for latency in (self.latency, self.reduce_wait):
            if not 0 <= latency < inf:
                raise InputError(f"a latency of 0 or more seconds at level {self.name!r}", latency, "change latency")


@named_fields
@dataclass(frozen=True)
class Cluster:
    """Devices, numbered host by host, and the levels that join them, innermost first."""

    devices: tuple[Device, ...]
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        count = _device_count(self.levels)
        if len(self.devices) != count:
            raise InputError(f"{count} devices, the product of the level sizes", len(self.devices), "make them agree")

    @classmethod
    def uniform(cls, levels: tuple[Level, ...], device: Device | None = None) -> Cluster:
        """Return a cluster of equal devices."""
        return cls((device or Device(),) * _device_count(levels), levels)

    def __hash__(self) -> int:
        """Hash the levels alone, because hashing thousands of devices is slow."""
        return hash(self.levels)

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """Numbers of devices in a group of each level, after a first 1 for a single device."""
        return tuple(accumulate((level.size for level in self.levels), mul, initial=1))

    def group(self, device: int, level: int) -> int:
        """Return which of the groups that `level` joins contains a device; at level 0 the device itself."""
        return device // self.spans[level]

    def meeting_level(self, a: int, b: int) -> int:
        """Return the lowest level whose group contains both devices."""
        for level, span in enumerate(self.spans[1:]):
            if a // span == b // span:
                return level
        raise InputError(f"devices below {len(self.devices)}", (a, b), "correct the device numbers")

    def to_json(self) -> dict[str, Any]:
        """Return plain data. Infinity, which JSON lacks, is null, or "inf" where null has another meaning."""
        return {
            "devices": [_finite(asdict(device)) for device in self.devices],
            "levels": [_finite(asdict(level)) for level in self.levels],
        }

    @classmethod
    @from_json_of("cluster")
    def from_json(cls, data: dict[str, Any]) -> Cluster:
        devices = tuple(Device(**_with_infinity(device, "memory")) for device in data["devices"])
        levels = (_with_infinity(_with_infinity(level, "bandwidth"), *REDUCE) for level in data["levels"])
        return cls(devices, tuple(Level(**level) for level in levels))


def require_device_count(devices: int) -> int:
    """Return `devices`; raise InputError if they are too many to list."""
    if devices > MOST_DEVICES:
        raise InputError(f"at most {MOST_DEVICES} devices in all", shown(devices), "describe a smaller cluster")
    return devices


def _device_count(levels: tuple[Level, ...]) -> int:
    return require_device_count(prod(level.size for level in levels))


def _finite(noun: dict[str, Any]) -> dict[str, Any]:
    words = dict([REDUCE])
    return {name: words.get(name) if value == inf else value for name, value in noun.items()}


def _with_infinity(noun: dict[str, Any], name: str, word: str | None = None) -> dict[str, Any]:
    return {**noun, name: inf} if name in noun and noun[name] == word else noun
