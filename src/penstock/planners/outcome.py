"""What a planner answers: the plan, what its own formula promises, and the profile that the plan's layers count in."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.cluster import Cluster
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.validation import whole
from penstock.errors import InputError


@dataclass(frozen=True)
class Outcome:
    """A plan and why to believe in it.

    `profile` is the one given, unless a branching graph had to be put in another order to make every stage a run of
    layers. `seconds` is what the method minimises: the slowest stage, the latency of a step, ...
    """

    method: str
    plan: Plan
    profile: Profile
    seconds: float


def require_stages(profile: Profile, cluster: Cluster, stages: int | None) -> int:
    """How many stages: one a device unless said otherwise, never more than there are layers or devices."""
    layers, devices = len(profile.layers), len(cluster.devices)
    count = min(layers, devices) if stages is None else stages
    if isinstance(count, int) and count < 1:
        raise InputError("at least 1 stage", count, "ask for more")
    whole("stages", count)
    if count > layers:
        raise InputError(f"at most {layers} stages, one for each layer", count, "ask for fewer stages")
    if count > devices:
        raise InputError(
            f"at most {devices} stages, one for each device of the cluster",
            count,
            "ask for fewer stages or add devices",
        )
    return count


def slowest(cluster: Cluster) -> float:
    """The speed of the slowest device: what a planner that knows one kind of device must count on."""
    return min(device.speed for device in cluster.devices)


def least_memory(cluster: Cluster) -> float:
    return min(device.memory for device in cluster.devices)
