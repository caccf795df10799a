"""Seconds of a step by cause: the same schedule timed again and again, each time with one more cause.

    equal stages, nothing else → compute, and the bubble of the schedule itself
    + the real stage costs     → imbalance          + recompute → recompute     + copies to host memory → offload
    + transfers → transfer     + reductions → reduction         + updates → update

Each part is what its cause adds to the makespan, so the parts add up to the whole.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from penstock.core.arguments import named, named_fields
from penstock.core.check import prove
from penstock.core.cost import Costs, shares
from penstock.core.links import FloatArray, Links
from penstock.core.schedule import BoolArray, Schedule, require_schedule
from penstock.core.shape import Shape
from penstock.core.validation import require_noun
from penstock.simulator.simulate import clock


@named_fields
@dataclass(frozen=True)
class Breakdown:
    """Seconds of one run by cause; their sum is the makespan."""

    compute: float
    bubble: float
    imbalance: float
    recompute: float
    offload: float
    transfer: float
    reduction: float
    update: float

    @property
    def makespan(self) -> float:
        return float(sum(asdict(self).values()))

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    def shares(self) -> dict[str, float]:
        """Return each part as a share of the makespan."""
        whole = self.makespan
        return {name: seconds / whole if whole else 0.0 for name, seconds in asdict(self).items()}


@named
def breakdown(schedule: Schedule, costs: Costs) -> Breakdown:
    """Return the seconds of a schedule by cause, from telescoping simulations."""
    require_schedule(schedule)
    require_noun(costs, Costs, "a timeline of simulate() has them: timeline.costs")
    proven = prove(schedule)
    shape, nothing = schedule.shape, np.zeros(schedule.shape.stages)
    never = np.zeros(shape.stages, dtype=bool)
    free = costs.links.free()
    bare = replace(costs, recompute=never, host_copy=None, links=free, reduce=nothing, update=nothing)
    ideal = clock(proven, _equal(shape, bare))
    ends = [ideal.makespan, clock(proven, bare).makespan]
    for cause in ("recompute", "host_copy", "links", "reduce", "update"):
        added = getattr(costs, cause)
        bare = replace(bare, **{cause: added})
        ends.append(clock(proven, bare).makespan if _takes_time(added) else ends[-1])
    # An order made for unequal stages may be the slower one on equal ones, and a transfer that comes later the better
    # one on a shared link: what a cause seems to save was never lost to those before it.
    reached = np.minimum.accumulate([ideal.work.mean(), *ends][::-1])[::-1]
    return Breakdown(float(reached[0]), *(float(part) for part in np.diff(reached)))


def _takes_time(added: FloatArray | BoolArray | Links | None) -> bool:
    parts = (added.seconds, added.latency, added.held) if isinstance(added, Links) else (added,)
    return any(part is not None and bool(part.any()) for part in parts)


def _equal(shape: Shape, costs: Costs) -> Costs:
    """Return the same work, spread evenly over stages and slots."""
    share = shares(shape)
    slow = np.array([costs.slowdown[shape.slot_rank == rank].mean() for rank in shape.placement])

    def even(seconds: FloatArray) -> FloatArray:
        return np.asarray((seconds * share * slow).mean() / share)

    return replace(
        costs,
        forward=even(costs.forward),
        input_grad=even(costs.input_grad),
        weight_grad=even(costs.weight_grad),
        full_backward=None if costs.full_backward is None else even(costs.full_backward),
        slowdown=np.ones(shape.slots),
    )
