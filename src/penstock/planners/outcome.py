"""The outcome of a planner: the plan, the seconds that its formula promises, and the profile its layers count in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.core.cluster import Cluster
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.validation import whole
from penstock.errors import InputError


@dataclass(frozen=True)
class PlanOutcome:
    """A plan with what its method promises.

    `profile` is the one given, unless a branching graph had to be put in another order to make every stage a run of
    layers. `seconds` is what the method minimises: the slowest stage, the latency of a step, ...
    """

    method: str
    plan: Plan
    profile: Profile
    seconds: float


class PlanScore(NamedTuple):
    """Seconds of a batch by the simulator, and bytes that the fullest device lacks for it."""

    seconds: float
    missing: float


Evaluate = Callable[[Plan, Profile], PlanScore]


@dataclass(frozen=True)
class Runner:
    """The best plan of one schedule."""

    method: str
    seconds: float
    plan: Plan
    profile: Profile


@dataclass(frozen=True)
class Searched(PlanOutcome):
    """An outcome of `search`: no plan takes less than `bound` seconds; `runners` are the best plans of all schedules.

    The fastest runner comes first. The plan may be slower than that by less than the share `margin`.
    """

    bound: float = 0.0
    runners: tuple[Runner, ...] = ()
    simulated: int = 0
    exact: bool = False  # every plan was simulated
    stopped: bool = False  # by the time limit
    margin: float = 0.0

    @property
    def gap(self) -> float:
        """How much longer it takes than the bound, as a share; where every plan was simulated, than the fastest."""
        least = self.runners[0].seconds if self.exact else self.bound
        return self.seconds / least - 1 if least else 0.0


def require_stages(profile: Profile, cluster: Cluster, stages: int | None) -> int:
    """Return how many stages: one a device unless given, never more than there are layers or devices."""
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
    """Return the speed of the slowest device, which a planner that knows one kind of device must count on."""
    return min(device.speed for device in cluster.devices)


def least_memory(cluster: Cluster) -> float:
    return min(device.memory for device in cluster.devices)
