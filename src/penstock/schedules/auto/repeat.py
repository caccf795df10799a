"""Periodic orders: one micro-batch's actions at fixed times, and every micro-batch the same a period later.

This is software pipelining (Lam 1988), which Qi et al. 2024 use for pipelines with controlled memory: what a rank holds
is the time from forward to gradient over the period, so a longer period needs less memory. The first micro-batch takes
the earliest times at which its actions do not meet those of the others, that is, at which they are apart modulo the
period. The times give only the order; the clock then lets everything start as soon as it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from penstock.schedules.auto.instance import Instance, Order

PERIODS = 40

Taken = list[tuple[float, float]]  # (start modulo the period, seconds)


def periods(instance: Instance) -> Iterator[float]:
    """Yield periods from the bottleneck's work, the shortest possible one, to eight times that, ever more coarsely."""
    for step in range(PERIODS):
        yield instance.busiest * (1.0 + 7.0 * (step / PERIODS) ** 2)


def varied(instance: Instance, period: float, delay: list[float], random: Random) -> tuple[float, list[float]]:
    """Return a period and delays a little different from these."""
    if random.random() < 0.7:
        period = max(instance.busiest, period * random.uniform(0.93, 1.02))
    delay = list(delay)
    for _ in range(random.choice((1, 1, 2, 4))):
        usual = random.choice((0.0, random.choice(instance.seconds), random.uniform(0.0, instance.busiest / 2)))
        delay[random.randrange(len(delay))] = usual
    return period, delay


def repeating(instance: Instance, period: float, delay: list[float]) -> Order:
    """Return the order of one period; `delay[code]` puts an action off, in seconds."""
    start = _first_microbatch(instance, period, delay)
    order: Order = []
    for owned in instance.owned:
        codes = [kind * instance.stages + s for s in owned for kind in range(3)]
        times = [(start[code] + k * period, k, code) for k in range(instance.microbatches) for code in codes]
        order.append([code for *_, code in sorted(times)])
    return order


def _first_microbatch(instance: Instance, period: float, delay: list[float]) -> list[float]:
    stages, seconds = instance.stages, instance.seconds
    taken: list[Taken] = [[] for _ in range(instance.ranks)]
    start = [0.0] * (3 * stages)
    arrival = [0.0] * instance.lanes
    chain = [*range(stages), *range(2 * stages - 1, stages - 1, -1)]
    for code in chain:  # what others wait for gets its place first
        ready = max((arrival[lane] for lane in instance.needs[code]), default=0.0) + delay[code]
        start[code] = _place(taken[instance.rank[code % stages]], ready, seconds[code], period)
        for lane, _, busy, latency in instance.sends[code]:
            arrival[lane] = start[code] + seconds[code] + busy + latency
    for code in chain[stages:]:
        weight, ready = code + stages, start[code] + seconds[code] + delay[code + stages]
        start[weight] = _place(taken[instance.rank[code % stages]], ready, seconds[weight], period)
    return start


def _place(taken: Taken, ready: float, seconds: float, period: float) -> float:
    """Return the earliest free time from `ready` on; `ready` itself where nothing is free."""
    waits = sorted([0.0, *((begin + length - ready) % period for begin, length in taken)])
    slack = 1e-9 * period
    for wait in waits:
        at = (ready + wait) % period
        if all(_apart(at, seconds, begin, length, period, slack) for begin, length in taken):
            taken.append((at, seconds))
            return ready + wait
    return ready


def _apart(at: float, seconds: float, begin: float, length: float, period: float, slack: float) -> bool:
    """Return whether two intervals on a circle do not meet."""
    after = (begin - at) % period  # from the start of the new one to that of the old one
    after = 0.0 if after > period - slack and seconds > slack else after
    return after + slack >= seconds and after + length <= period + slack
