"""The error when no plan fits: how many bytes are missing, and the smallest changes that would fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor, inf, log10

from penstock.core.cluster import Cluster
from penstock.core.profile import Profile
from penstock.errors import InputError
from penstock.planners.chain import LayerSums
from penstock.planners.outcome import least_memory
from penstock.planners.scaled import scaled


@dataclass(frozen=True)
class Need:
    """The least that the fullest device must hold, and what makes it so."""

    bytes: float
    words: str = ""

    def fits(self, room: float) -> bool:
        """Return whether so much memory is enough, with a margin, since planners add bytes in other orders."""
        return self.bytes <= room * (1 - 1e-5)


NeedOf = Callable[[Profile, int], Need]  # of a profile whose micro-batches have other rows, on so many devices


@dataclass(frozen=True)
class Rule:
    """Bytes that a method keeps on a stage with d stages behind it: activations of `slope` · d + `base` micro-batches,
    and `versions` of the weights (0: one for each of those)."""

    versions: int = 1
    slope: int = 1
    base: int = 1
    recompute: bool = False
    deepest: int | None = None  # stages at most
    replicas: int | None = None  # that may split a micro-batch, at most
    cap: int | None = None  # of micro-batches whose activations are kept, at most


@dataclass(frozen=True)
class _StageNeed:
    bytes: float
    first: int
    last: int
    standing: float


def least_need(rule: Rule, profile: Profile, devices: int) -> Need:
    """Return the least need of all cuts into stages of equally many devices, with recomputed activations if allowed."""
    best, wide = _StageNeed(inf, 0, 0, 0.0), 1
    for each in range(1, min(devices, profile.samples, rule.replicas or devices) + 1):
        least = _least(rule, LayerSums.of(scaled_down(profile, each)), devices // each)
        if least.bytes < best.bytes:
            best, wide = least, each
    rest, name = best.bytes - best.standing, profile.layers[best.first].name
    stages = "one stage a device" if wide == 1 else f"{wide} devices a stage"
    return Need(
        best.bytes,
        f"with {stages} ({best.standing / 1e9:.4g} GB of weights, gradients and optimizer and {rest / 1e9:.4g} GB of "
        f"activations, layers {best.first} to {best.last}, {name} and on)",
    )


def scaled_down(profile: Profile, replicas: int) -> Profile:
    """Return the profile of the part of each micro-batch that one of some replicas has."""
    if replicas == 1:
        return profile
    layers = tuple(
        replace(layer, kept_bytes=layer.kept_bytes / replicas, output_bytes=layer.output_bytes / replicas)
        for layer in profile.layers
    )
    return replace(profile, layers=layers, sent=tuple(replace(one, bytes=one.bytes / replicas) for one in profile.sent))


def _least(rule: Rule, chain: LayerSums, devices: int) -> _StageNeed:
    layers = chain.layers
    behind = {layers: _StageNeed(0.0, 0, 0, 0.0)}
    best = _StageNeed(inf, 0, layers - 1, 0.0)
    for depth in range(min(devices, layers, rule.deepest or layers)):
        values: dict[int, _StageNeed] = {}
        for i in range(layers - 1, -1, -1):
            options = [_larger(_stage(rule, chain, i, j, depth), behind[j]) for j in behind if j > i]
            if options:
                values[i] = min(options, key=lambda stage: stage.bytes)
        behind = values
        if 0 in values and values[0].bytes < best.bytes:
            best = values[0]
    return best


def _stage(rule: Rule, chain: LayerSums, i: int, j: int, depth: int) -> _StageNeed:
    flying = min(rule.slope * depth + rule.base, rule.cap or inf)
    more = (rule.versions or flying) - 1
    standing = float(chain.standing[j] - chain.standing[i] + more * (chain.parameters[j] - chain.parameters[i]))
    kept, came = float(chain.kept[j] - chain.kept[i]), float(chain.cut[i])
    live = min(flying * kept, (flying + 1) * came + kept if rule.recompute else inf)
    return _StageNeed(standing + live, i, j - 1, standing)


def _larger(stage: _StageNeed, rest: _StageNeed) -> _StageNeed:
    return stage if stage.bytes >= rest.bytes else rest


def shortage(profile: Profile, cluster: Cluster, need_of: NeedOf, relieved: NeedOf | None = None) -> InputError:
    """Return the error of a planner that has no plan. `relieved` is the need where activations are recomputed, for a
    method that does not do so itself."""
    devices, room, need = len(cluster.devices), least_memory(cluster), need_of(profile, len(cluster.devices))
    mixed = len({device.memory for device in cluster.devices}) > 1
    expected = f"a plan that fits {room / 1e9:.4g} GB a device on {devices} device(s)" + (
        " (the smallest has so much)" if mixed else ""
    )
    if need.fits(room):
        came = f"none that this method allows, though {need.bytes / 1e9:.4g} GB would do {need.words}"
        return InputError(expected, came, "allow other schedules, or use smaller micro-batches or larger devices")
    return InputError(
        expected,
        f"{need.bytes / 1e9:.4g} GB on the fullest {need.words}, {(need.bytes - room) / 1e9:.4g} GB short",
        f"what would fit: {'; or '.join(_ways(profile, devices, room, need_of, relieved))}",
    )


def _ways(profile: Profile, devices: int, room: float, need_of: NeedOf, relieved: NeedOf | None) -> list[str]:
    """Return changes of which each alone is enough, the smallest first."""
    ways = []
    rows = _rows_that_fit(profile, devices, room, need_of)
    if rows is not None:
        ways.append(f"micro-batches of {rows} rows in place of {profile.samples}")
    if relieved is not None and relieved(profile, devices).fits(room):
        ways.append("recompute (the method search decides where)")
    more = _devices_that_fit(profile, devices, room, need_of)
    if more is not None:
        ways.append(f"{more} such devices in place of {devices}")
    return [*ways, f"devices of {enough(need_of(profile, devices).bytes)} GB"]


def enough(size: float) -> str:
    """Return gigabytes in four digits, rounded up, so that they are enough."""
    unit = 10.0 ** (floor(log10(size)) - 3)
    return f"{ceil(size * (1 + 2e-5) / unit) * unit / 1e9:.4g}"


def _devices_that_fit(profile: Profile, devices: int, room: float, need_of: NeedOf) -> int | None:
    """Return how many devices of the same kind are enough, up to one a layer, or None."""
    low, high = devices, len(profile.layers)
    if high <= low or not need_of(profile, high).fits(room):
        return None
    while low + 1 < high:
        middle = (low + high) // 2
        if need_of(profile, middle).fits(room):
            high = middle
        else:
            low = middle
    return high


def _rows_that_fit(profile: Profile, devices: int, room: float, need_of: NeedOf) -> int | None:
    """Return the rows of the largest half, quarter, ... of a micro-batch that fits, or None."""
    rows = profile.samples // 2
    while rows >= 1:
        if need_of(scaled(profile, rows), devices).fits(room):
            return rows
        rows //= 2
    return None
