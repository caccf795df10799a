"""End times of each mini-batch of a run, the time per mini-batch in the steady state, and the utilisation then."""

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


def steady_range(count: int, stages: int, flushed: int = 0) -> tuple[int, int]:
    """Return the first and last mini-batch of the steady state: after filling and flushed steps, before draining. A run
    too short for that is counted from its first to its last."""
    first, last = flushed + stages, count - 1 - stages
    return (first, last) if last > first else (min(flushed, max(count - 2, 0)), count - 1)


def pace(finish: Sequence[float], stages: int, flushed: int = 0) -> float:
    """Return the seconds of a mini-batch in the steady state."""
    if len(finish) < 2:
        return float(finish[0])
    first, last = steady_range(len(finish), stages, flushed)
    return float(finish[last] - finish[first]) / (last - first)


def finish_times(line: Timeline) -> FloatArray:
    """Return when each mini-batch has passed all stages, its updates included."""
    shape, rows = line.schedule.shape, line.schedule.rows
    compute, update = rows.op <= Op.FB, rows.op == Op.UPDATE
    batch = np.where(update, rows.version - 1, rows.microbatch // shape.microbatches)
    done = np.zeros(shape.batches)
    np.maximum.at(done, batch[compute | update], line.end[compute | update])
    return done


def utilisation(line: Timeline) -> float:
    """Return the mean share of busy stages over a step, or over the steady part of a run without a flush."""
    shape = line.schedule.shape
    if shape.batches < 2:
        return line.utilisation
    done = finish_times(line)
    first, last = steady_range(len(done), shape.stages)
    begin, end = done[first], done[last]
    busy = (line.schedule.rows.op <= Op.FB) | (line.schedule.rows.op == Op.UPDATE)
    within = np.minimum(line.end, end) - np.maximum(line.start, begin)
    return float(np.maximum(within[busy], 0.0).sum() / (shape.slots * (end - begin)))


def simulated(built: Schedule | Loop, costs: Costs, steps: int, flushed: int) -> tuple[list[float], float]:
    """Return when each mini-batch of a run would end on devices of these costs, and their utilisation."""
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
    return [*done, *(finish_times(line) + begun).tolist()], utilisation(line)
