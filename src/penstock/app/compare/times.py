"""When each mini-batch of a run is done, how long one takes in the steady state, and how busy the stages are then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.action import Op
from penstock.core.cost import Costs
from penstock.core.links import FloatArray
from penstock.core.loop import Loop
from penstock.core.schedule import Schedule
from penstock.core.timeline import Timeline
from penstock.simulator.simulate import simulate_costs


def steady(count: int, stages: int, flushed: int = 0) -> tuple[int, int]:
    """The first and the last mini-batch between which a run is steady: neither filling nor draining, nor flushing
    every time. A run too short for that counts from its first to its last."""
    first, last = flushed + stages, count - 1 - stages
    return (first, last) if last > first else (min(flushed, max(count - 2, 0)), count - 1)


def pace(finish: Sequence[float], stages: int, flushed: int = 0) -> float:
    """Seconds of a mini-batch in the steady state."""
    if len(finish) < 2:
        return float(finish[0])
    first, last = steady(len(finish), stages, flushed)
    return float(finish[last] - finish[first]) / (last - first)


def finished(line: Timeline) -> FloatArray:
    """When each mini-batch has been through all stages, its updates included."""
    shape, rows = line.schedule.shape, line.schedule.rows
    compute, update = rows.op <= Op.FB, rows.op == Op.UPDATE
    batch = np.where(update, rows.version - 1, rows.microbatch // shape.microbatches)
    done = np.zeros(shape.batches)
    np.maximum.at(done, batch[compute | update], line.end[compute | update])
    return done


def utilisation(line: Timeline) -> float:
    """The mean share of stages that are busy: over a step, or over the steady part of a run without a flush."""
    shape = line.schedule.shape
    if shape.batches < 2:
        return line.utilisation
    done = finished(line)
    first, last = steady(len(done), shape.stages)
    begin, end = done[first], done[last]
    busy = (line.schedule.rows.op <= Op.FB) | (line.schedule.rows.op == Op.UPDATE)
    within = np.minimum(line.end, end) - np.maximum(line.start, begin)
    return float(np.maximum(within[busy], 0.0).sum() / (shape.slots * (end - begin)))


def simulated(built: Schedule | Loop, costs: Costs, steps: int, flushed: int) -> tuple[list[float], float]:
    """When each mini-batch of a run would be done on devices of these costs, and how busy they would be."""
    if isinstance(built, Schedule):
        line = simulate_costs(built, costs)
        return [line.makespan * (step + 1) for step in range(steps)], line.utilisation
    alone = simulate_costs(built.unroll(1), costs)
    first = min(flushed, steps)
    done = [alone.makespan * (step + 1) for step in range(first)]
    if first == steps:
        return done, alone.utilisation
    line = simulate_costs(built.unroll(steps - first), costs)
    begun = done[-1] if done else 0.0
    return [*done, *(finished(line) + begun).tolist()], utilisation(line)
