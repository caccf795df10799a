"""A makespan that no order can beat, whatever the search."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.core.cost import Costs
from penstock.core.shape import Shape
from penstock.schedules.auto.instance import Instance, make_instance
from penstock.schedules.auto.relax import relaxed


def lower_bound(shape: Shape, costs: Costs, memory: float | Sequence[float] = math.inf) -> float:
    """Return the greatest of these, for one mini-batch and `memory` activations a rank. Each holds for every order.

    Let a path be a chain of actions and transfers of one micro-batch, which must follow each other, and of a rank
    `head` the earliest start of its first forward, `back` that of its first input gradient (paths from the start), and
    `rest` the shortest, over its stages, of the longest paths behind an input gradient up to the end of the step.

    relaxed   what relax.py derives, stage by stage, from the order of the micro-batches and the memory of the stage.
    work      head + all the rank's work + its update. Until `back` it can only run forwards, and no more than its
              memory holds, so also back + all its work but those forwards + update.
    drain     its last input gradient ends after all its forwards, input gradients, and all weight gradients but those
              whose activations it can hold at that moment; then follows `rest`. From `head`, or from `back` without the
              forwards that memory lets it run earlier.
    held      a micro-batch holds memory on each stage of a rank from forward to input gradient, at least the longest
              path between them: head + (memory x seconds of all micro-batches) / memory of the rank + rest.
    link      a link's first tensor, all its tensors one after the other, and the shortest path behind one of them.
    """
    caps = [float(memory)] * shape.ranks if isinstance(memory, (int, float)) else [float(value) for value in memory]
    return bound(make_instance(shape, costs, caps))


def bound(instance: Instance) -> float:
    """Return `lower_bound` of an instance."""
    steps = _steps(instance)
    ahead, behind = _paths(instance, steps)
    best = max(relaxed(instance, behind), _links(instance, ahead, behind))
    for rank in range(instance.ranks):
        best = max(best, _work_and_drain(instance, rank, ahead, behind))
        if instance.cap[rank] < math.inf and len(instance.owned[rank]) > 1:
            best = max(best, _held(instance, rank, steps, ahead, behind))
    return best


Steps = list[list[tuple[int, float]]]  # by code: what follows in its micro-batch, and the seconds of transfer between


def round_trips(instance: Instance) -> list[float]:
    """Return by stage the longest path from the start of its forward to the end of its input gradient."""
    steps = _steps(instance)
    return [_life(instance, steps, stage) for stage in range(instance.stages)]


def _sequence(instance: Instance) -> list[int]:
    """Return the codes so that each comes after what it needs."""
    stages = range(instance.stages)
    back = [code for s in reversed(stages) for code in (instance.stages + s, 2 * instance.stages + s)]
    return [*stages, *back]


def _targets(instance: Instance) -> list[int]:
    """Return the code that reads each lane."""
    target = [0] * instance.lanes
    for code, lanes in enumerate(instance.needs):
        for lane in lanes:
            target[lane] = code
    return target


def _steps(instance: Instance) -> Steps:
    target = _targets(instance)
    steps = [[(target[lane], busy + late) for lane, _, busy, late in sends] for sends in instance.sends]
    for code in range(instance.stages, 2 * instance.stages):
        steps[code].append((code + instance.stages, 0.0))
    return steps


def _paths(instance: Instance, steps: Steps) -> tuple[list[float], list[float]]:
    """Return the longest path before the start of every code, and behind its end."""
    sequence = _sequence(instance)
    ahead = [0.0] * len(sequence)
    for code in sequence:
        for after, transfer in steps[code]:
            ahead[after] = max(ahead[after], ahead[code] + instance.seconds[code] + transfer)
    behind = [0.0] * len(sequence)
    for code in reversed(sequence):
        least = instance.tail[instance.rank[code % instance.stages]] if code >= 2 * instance.stages else 0.0
        behind[code] = max(
            [least, *(transfer + instance.seconds[after] + behind[after] for after, transfer in steps[code])]
        )
    return ahead, behind


def _most(value: list[float], size: list[float], room: float, count: int) -> float:
    """Return the most that `count` items of each kind can be worth within the room: densest first, also in parts."""
    total = 0.0
    for worth, each in sorted(zip(value, size, strict=True), key=lambda pair: pair[0] / max(pair[1], 1e-300))[::-1]:
        number = min(float(count), max(0.0, room / each)) if each > 0 else float(count)
        total, room = total + number * worth, room - number * each if each > 0 else room
    return total


def _work_and_drain(instance: Instance, rank: int, ahead: list[float], behind: list[float]) -> float:
    m, stages, owned, room = instance.microbatches, instance.stages, instance.owned[rank], instance.cap[rank]
    forward, back, weight = ([instance.seconds[k * stages + s] for s in owned] for k in range(3))
    held = [-instance.drop[2 * stages + s] for s in owned]
    during = min(instance.grab[s] + instance.grab[stages + s] for s in owned)  # while an input gradient runs
    before_back = _most(forward, [instance.grab[s] for s in owned], room, m)
    deferred = min(m * sum(weight), max(weight) + _most(weight, held, room - during, m))
    head = min(ahead[s] for s in owned)
    first_back = min(ahead[stages + s] for s in owned)
    both, weights = m * (sum(forward) + sum(back)), m * sum(weight)
    reached = max(head + both, first_back + both - before_back)  # end of the last input gradient, but for weights
    rest = min(behind[stages + s] for s in owned)
    return max(reached + weights - deferred + rest, reached + weights + instance.tail[rank])


def _held(instance: Instance, rank: int, steps: Steps, ahead: list[float], behind: list[float]) -> float:
    owned = instance.owned[rank]
    held = sum(instance.grab[s] * _life(instance, steps, s) for s in owned)
    head, rest = min(ahead[s] for s in owned), min(behind[instance.stages + s] for s in owned)
    return head + instance.microbatches * held / instance.cap[rank] + rest


def _life(instance: Instance, steps: Steps, stage: int) -> float:
    """Return the longest path from the start of a stage's forward to the end of its input gradient."""
    goal = instance.stages + stage
    reach = [-math.inf] * (3 * instance.stages)
    reach[stage] = 0.0
    for code in _sequence(instance):
        for after, transfer in steps[code]:
            reach[after] = max(reach[after], reach[code] + instance.seconds[code] + transfer)
    return reach[goal] + instance.seconds[goal]


def _links(instance: Instance, ahead: list[float], behind: list[float]) -> float:
    target = _targets(instance)
    first: dict[int, float] = {}
    load: dict[int, float] = {}
    rest: dict[int, float] = {}
    for code, sends in enumerate(instance.sends):
        for lane, link, busy, late in sends:
            if link >= 0:
                after = late + instance.seconds[target[lane]] + behind[target[lane]]
                first[link] = min(first.get(link, math.inf), ahead[code] + instance.seconds[code])
                load[link] = load.get(link, 0.0) + instance.microbatches * busy
                rest[link] = min(rest.get(link, math.inf), after)
    return max((first[link] + load[link] + rest[link] for link in load), default=0.0)
