"""The machines: devices in nested groups, and what joins them.

Level 0 joins the devices of one host, level 1 the hosts, and so on. Two devices meet at the lowest level whose group
holds both. At a level that is `shared`, all traffic that leaves or enters a group passes one full-duplex uplink and
waits its turn there; elsewhere every pair of devices has a link of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import accumulate
from math import inf, prod
from operator import mul
from typing import Any

from penstock.core.arguments import named_fields
from penstock.core.given import from_json_of, shown, sized, text, truth, whole
from penstock.errors import InputError

MOST_DEVICES = 1_000_000
SLOWEST = 1e-9  # of speeds and bytes/s, where they are not 0: what is divided by less is beyond all numbers
REDUCE = ("reduce_bandwidth", "inf")  # how JSON has one without limit: its null says that it is as the bandwidth


@named_fields
@dataclass(frozen=True)
class Device:
    """One kind of device: bytes of memory, and its speed as a multiple of the one that was profiled.

    `host_bandwidth` is the bytes/s, each way, between it and its host's memory; 0: nothing can be offloaded.
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
    reduce_bandwidth: float | None = None  # all-reduce may see another figure than a single transfer
    shared: bool = False
    reduce_rings: bool = False  # `reduce_bandwidth` is that of two members; n of them run n // 2 rings at once
    reduce_latency: float | None = None  # seconds of one of its 2(n - 1) steps, where it differs from a transfer's
    blocking: bool = False  # who sends makes the transfer himself and does nothing else meanwhile: shared memory

    def reduce_rate(self, members: int) -> float:
        """Bytes/s that an all-reduce over so many members sees."""
        rate = self.bandwidth if self.reduce_bandwidth is None else self.reduce_bandwidth
        return rate * max(1, members // 2) if self.reduce_rings else rate

    @property
    def reduce_wait(self) -> float:
        """Seconds of one step of an all-reduce, however little it carries."""
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
        """Bandwidths above 0, latencies of 0 or more, and none beyond reason."""
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
    """Devices numbered host by host, and the levels that join them, innermost first."""

    devices: tuple[Device, ...]
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        room = _room(self.levels)
        if len(self.devices) != room:
            raise InputError(f"{room} devices, the product of the level sizes", len(self.devices), "make them agree")

    @classmethod
    def uniform(cls, levels: tuple[Level, ...], device: Device | None = None) -> Cluster:
        """Equal devices throughout."""
        return cls((device or Device(),) * _room(levels), levels)

    def __hash__(self) -> int:
        """Of the levels alone: thousands of devices take long to look at."""
        return hash(self.levels)

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """Devices in a group of each level, and first the 1 of a device itself."""
        return tuple(accumulate((level.size for level in self.levels), mul, initial=1))

    def group(self, device: int, level: int) -> int:
        """The group of `level` sizes that holds a device; at level 0 the device itself."""
        return device // self.spans[level]

    def meeting_level(self, a: int, b: int) -> int:
        """The lowest level whose group holds both devices."""
        for level, span in enumerate(self.spans[1:]):
            if a // span == b // span:
                return level
        raise InputError(f"devices below {len(self.devices)}", (a, b), "correct the device numbers")

    def to_json(self) -> dict[str, Any]:
        """What has no limit is null, since JSON has no infinity; where null says something else it is "inf"."""
        return {
            "devices": [_finite(asdict(device)) for device in self.devices],
            "levels": [_finite(asdict(level)) for level in self.levels],
        }

    @classmethod
    @from_json_of("cluster")
    def from_json(cls, data: dict[str, Any]) -> Cluster:
        devices = tuple(Device(**_endless(device, "memory")) for device in data["devices"])
        levels = (_endless(_endless(level, "bandwidth"), *REDUCE) for level in data["levels"])
        return cls(devices, tuple(Level(**level) for level in levels))


def require_room(devices: int) -> int:
    """So many devices, if they can be listed."""
    if devices > MOST_DEVICES:
        raise InputError(f"at most {MOST_DEVICES} devices in all", shown(devices), "describe a smaller cluster")
    return devices


def _room(levels: tuple[Level, ...]) -> int:
    return require_room(prod(level.size for level in levels))


def _finite(noun: dict[str, Any]) -> dict[str, Any]:
    words = dict([REDUCE])
    return {name: words.get(name) if value == inf else value for name, value in noun.items()}


def _endless(noun: dict[str, Any], name: str, word: str | None = None) -> dict[str, Any]:
    return {**noun, name: inf} if name in noun and noun[name] == word else noun
