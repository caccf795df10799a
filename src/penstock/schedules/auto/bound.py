"""A makespan that no order can beat, whatever the search."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.core.cost import Costs
from penstock.core.shape import Shape
from penstock.schedules.auto.instance import Instance, make_instance


def lower_bound(shape: Shape, costs: Costs, memory: float | Sequence[float] = math.inf) -> float:
    """The greatest of these, for one mini-batch and `memory` activations a rank. Each holds for every order.

    Let a path be a chain of actions and transfers of one micro-batch, which must follow each other, and of a rank
    `head` the earliest start of its first forward, `back` that of its first input gradient (paths from the start), and
    `rest` the shortest, over its stages, of the longest paths behind an input gradient up to the end of the step.

    work      head + all its work + its update. Until `back` it can only run forwards, and no more than its memory
              holds, so also back + all its work but those forwards + update.
    drain     its last input gradient ends after all its forwards, input gradients, and all weight gradients but those
              whose activations it can hold at that moment; then follows `rest`. From `head`, or from `back` without the
              forwards that memory lets it run earlier.
    in flight a micro-batch holds memory from its forward until its input gradient, which takes at least the longest
              path L between them. Memory holds n at a time, so some ceil(m / n) of them follow each other:
              head + ceil(m / n) L + rest. With several stages a rank: memory times seconds held, over the memory.
    link      the first tensor cannot leave before `its head`; m tensors follow each other; then the shortest rest.
    one       the longest path of a single micro-batch.
    """
    caps = [float(memory)] * shape.ranks if isinstance(memory, (int, float)) else [float(value) for value in memory]
    return bound(make_instance(shape, costs, caps))


def bound(instance: Instance) -> float:
    """`lower_bound` of an instance."""
    ahead, behind = _paths(instance)
    best = max(start + instance.seconds[code] + behind[code] for code, start in enumerate(ahead))
    for rank in range(instance.ranks):
        best = max(best, _work_and_drain(instance, rank, ahead, behind), _in_flight(instance, rank, ahead, behind))
    return max(best, _links(instance, ahead, behind))


def _sequence(instance: Instance) -> list[int]:
    """The codes so that each comes after what it needs."""
    stages = range(instance.stages)
    back = [code for s in reversed(stages) for code in (instance.stages + s, 2 * instance.stages + s)]
    return [*stages, *back]


def _targets(instance: Instance) -> list[int]:
    """The code that reads each lane."""
    target = [0] * instance.lanes
    for code, lanes in enumerate(instance.needs):
        for lane in lanes:
            target[lane] = code
    return target


def _steps(instance: Instance) -> list[list[tuple[int, float]]]:
    """By code: what follows it in its own micro-batch, and the seconds of the transfer between."""
    target = _targets(instance)
    steps = [[(target[lane], busy + late) for lane, _, busy, late in sends] for sends in instance.sends]
    for code in range(instance.stages, 2 * instance.stages):
        steps[code].append((code + instance.stages, 0.0))
    return steps


def _paths(instance: Instance) -> tuple[list[float], list[float]]:
    """Longest path before the start of every code, and behind its end."""
    steps, sequence = _steps(instance), _sequence(instance)
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
    """At most this much value fits: `count` pieces of each kind, fractions allowed unless there is only one kind."""
    if len(value) == 1:
        number = count if size[0] <= 0 else min(count, math.floor(room / size[0])) if room < math.inf else count
        return max(0, number) * value[0]
    total = 0.0
    for worth, each in sorted(zip(value, size, strict=True), key=lambda pair: pair[0] / max(pair[1], 1e-300))[::-1]:
        number = min(float(count), max(0.0, room / each)) if each > 0 else float(count)
        total, room = total + number * worth, room - number * each if each > 0 else room
    return total


def _work_and_drain(instance: Instance, rank: int, ahead: list[float], behind: list[float]) -> float:
    m, stages, owned = instance.microbatches, instance.stages, instance.owned[rank]
    room = instance.cap[rank]
    forward, back, weight = ([instance.seconds[k * stages + s] for s in owned] for k in range(3))
    kept = [instance.grab[s] for s in owned]
    late = [-instance.drop[2 * stages + s] for s in owned]
    during = min(instance.grab[s] + instance.grab[stages + s] for s in owned)  # held while an input gradient runs
    before_back = _most(forward, kept, room, m)
    own = max(range(len(owned)), key=lambda at: weight[at])
    deferred = min(m * sum(weight), weight[own] + _most(weight, late, room - during, m))
    head = min(ahead[s] for s in owned)
    first_back = min(ahead[stages + s] for s in owned)
    rest = min(behind[stages + s] for s in owned)
    both, whole = m * (sum(forward) + sum(back)), m * (sum(forward) + sum(back) + sum(weight))
    drained = max(head + both, first_back + both - before_back) + m * sum(weight) - deferred + rest
    worked = max(head + whole, first_back + whole - before_back) + instance.tail[rank]
    return max(drained, worked)


def _in_flight(instance: Instance, rank: int, ahead: list[float], behind: list[float]) -> float:
    m, stages, owned, room = instance.microbatches, instance.stages, instance.owned[rank], instance.cap[rank]
    if math.isinf(room):
        return 0.0
    best = held = 0.0
    for s in owned:
        life = _life(instance, s)
        held += instance.grab[s] * life
        if instance.grab[s] > 0:
            turns = -(-m // max(1, math.floor(room / instance.grab[s])))
            best = max(best, ahead[s] + turns * life + behind[stages + s])
    area = m * held / room
    return max(best, min(ahead[s] for s in owned) + area + min(behind[stages + s] for s in owned))


def _life(instance: Instance, stage: int) -> float:
    """Longest path from the start of a stage's forward to the end of its input gradient."""
    steps, goal = _steps(instance), instance.stages + stage
    reach = [-math.inf] * (3 * instance.stages)
    reach[stage] = 0.0
    for code in _sequence(instance):
        for after, transfer in steps[code]:
            reach[after] = max(reach[after], reach[code] + instance.seconds[code] + transfer)
    return reach[goal] + instance.seconds[goal]


def _links(instance: Instance, ahead: list[float], behind: list[float]) -> float:
    target = _targets(instance)
    first, load, rest = ({} for _ in range(3))  # type: dict[int, float], dict[int, float], dict[int, float]
    for code, sends in enumerate(instance.sends):
        for lane, link, busy, late in sends:
            if link >= 0:
                after = late + instance.seconds[target[lane]] + behind[target[lane]]
                first[link] = min(first.get(link, math.inf), ahead[code] + instance.seconds[code])
                load[link] = load.get(link, 0.0) + instance.microbatches * busy
                rest[link] = min(rest.get(link, math.inf), after)
    return max((first[link] + load[link] + rest[link] for link in load), default=0.0)
