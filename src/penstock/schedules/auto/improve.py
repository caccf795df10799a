"""Local improvement: move one action on a critical path, keep the order if it is no worse.

Only a change on a critical path (a chain of actions without slack from the start to the end) can shorten an order. A
place to change is a pair of neighbours on one rank that follow each other without a gap: the second may go earlier, or
the first later.
"""

from __future__ import annotations

import math
from random import Random

from penstock.schedules.auto.clock import clock, fits
from penstock.schedules.auto.instance import Instance, Order

Ends = list[list[float]]


def improve(instance: Instance, order: Order, tries: int, target: float, random: Random) -> tuple[float, Order]:
    """Return a better order after at most `tries` looks at the clock; stops at `target`, which nothing can beat."""
    span, ends = clock(instance, order)
    best_span, best = span, order
    places: list[tuple[int, int]] = []
    warmth = 0.01 * (span - target)
    for turn in range(tries):
        if best_span <= target * (1 + 1e-10):
            break
        if not places:
            places = critical(instance, order, ends)
        moved = _move(instance, order, places, random)
        if moved is None:
            continue
        new_span, new_ends = clock(instance, moved)
        if new_span <= span + warmth * (1 - turn / tries) * random.random():
            order, span, ends, places = moved, new_span, new_ends, []
            if span < best_span - 1e-12 * best_span:
                best_span, best = span, order
    return best_span, best


def critical(instance: Instance, order: Order, ends: Ends) -> list[tuple[int, int]]:
    """Return (rank, position) of every action on one critical path that started as soon as its rank was free."""
    where = _positions(instance, order)
    source = _sources(instance)
    rank = max(range(instance.ranks), key=lambda r: ends[r][-1] + instance.tail[r])
    at = len(order[rank]) - 1
    places = []
    while True:
        code = order[rank][at]
        begin = ends[rank][at] - instance.seconds[code]
        if at > 0 and begin <= ends[rank][at - 1] * (1 + 1e-12):
            places.append((rank, at))
            at -= 1
            continue
        waited = _waited_for(instance, code, where[code].index(at), where, ends, source)
        if waited is None:
            return places
        rank, at = waited


def _positions(instance: Instance, order: Order) -> list[list[int]]:
    """Return by code its positions in its rank's list."""
    where: list[list[int]] = [[] for _ in range(3 * instance.stages)]
    for codes in order:
        for at, code in enumerate(codes):
            where[code].append(at)
    return where


def _sources(instance: Instance) -> list[int]:
    """Return the code that feeds each lane."""
    source = [0] * instance.lanes
    for code, sends in enumerate(instance.sends):
        for lane, *_ in sends:
            source[lane] = code
    return source


def _waited_for(
    instance: Instance, code: int, number: int, where: list[list[int]], ends: Ends, source: list[int]
) -> tuple[int, int] | None:
    """Return the action whose tensor came last; where a link was busy, it is only near the critical path."""
    sender_at, latest = None, -math.inf
    for lane in instance.needs[code]:
        sender = source[lane]
        rank, at = instance.rank[sender % instance.stages], where[sender][number]
        if ends[rank][at] > latest:
            sender_at, latest = (rank, at), ends[rank][at]
    return sender_at


def _move(instance: Instance, order: Order, places: list[tuple[int, int]], random: Random) -> Order | None:
    """Return the order with one action moved, or None where the move drawn breaks a rule."""
    if not places:
        return None
    rank, at = places[random.randrange(len(places))]
    codes = order[rank]
    far = 1 if random.random() < 0.5 else random.randint(2, 8)
    if random.random() < 0.5:
        source, target = at, max(0, at - far)
    else:
        source, target = at - 1, min(len(codes) - 1, at - 1 + far)
    if codes[source] == codes[target]:
        return None
    changed = codes[:source] + codes[source + 1 :]
    changed.insert(target, codes[source])
    if not fits(instance, rank, changed):
        return None
    return [changed if r == rank else other for r, other in enumerate(order)]
