"""The search: the named methods, then many greedy and periodic orders, then local improvement of the best few.

Work is counted in looks at the clock, not in seconds, so that the same call gives the same schedule everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from random import Random

from penstock.schedules.auto.bound import bound, round_trips
from penstock.schedules.auto.clock import clock, fits
from penstock.schedules.auto.greedy import Builder, Policy
from penstock.schedules.auto.improve import improve
from penstock.schedules.auto.instance import Instance, Order
from penstock.schedules.auto.repeat import periods, repeating, varied

GREEDY_LOOKS = 6  # building a greedy order takes about as long as this many looks at the clock
ROUNDING = 1e-10
STARTS = 4  # orders that local improvement starts from

TimedOrder = tuple[float, Order, Policy | None]


class Pool:
    """The best few orders so far, no two of the same length, and the work that is left."""

    def __init__(self, instance: Instance, effort: int) -> None:
        self.instance, self.left, self.target = instance, effort, bound(instance)
        self.orders: list[TimedOrder] = []

    @property
    def best(self) -> float:
        return self.orders[0][0] if self.orders else math.inf

    @property
    def proven(self) -> bool:
        """Whether the best order is as short as the bound, up to rounding."""
        return self.best <= self.target * (1 + ROUNDING)

    def add(self, span: float, order: Order, policy: Policy | None = None) -> None:
        tolerance = 1e-9 * span
        if math.isfinite(span) and all(abs(span - other) > tolerance for other, *_ in self.orders):
            self.orders = sorted([*self.orders, (span, order, policy)], key=lambda one: one[0])[:STARTS]

    def time(self, order: Order) -> float:
        """Time an order that may not fit; infinite where it does not."""
        self.left -= 1
        if not all(fits(self.instance, rank, codes) for rank, codes in enumerate(order)):
            return math.inf
        span, _ = clock(self.instance, order)
        self.add(span, order)
        return span

    def build(self, policy: Policy) -> float:
        """Build and time a greedy order; infinite where it ends in a deadlock."""
        self.left -= GREEDY_LOOKS
        order = Builder(self.instance, policy).run()
        if order is None:
            return math.inf
        span, _ = clock(self.instance, order)
        self.add(span, order, policy)
        return span


def search(instance: Instance, candidates: Iterable[Order], effort: int, seed: int) -> Order:
    """Return the best order. `candidates` are always tried, whatever the effort; one of them must fit the memory."""
    pool = Pool(instance, effort)
    for order in candidates:
        pool.time(order)
    pool.left = effort
    random = Random(seed)
    if instance.squeezed and instance.busiest > 0:
        _try_periods(pool, random, until=effort * 19 // 20)
    _try_policies(pool, until=effort // 2)
    _vary_policies(pool, random, until=effort * 2 // 5)
    share = max(0, pool.left) // STARTS
    for _, order, _ in list(pool.orders):
        if pool.proven:
            break
        pool.add(*improve(instance, order, share, pool.target, random))
    return pool.orders[0][1]


def default_effort(instance: Instance) -> int:
    """Return an effort of about a second of plain Python up to some thousand actions, and of more beyond."""
    return max(60, min(4000, 3_000_000 // instance.actions))


def _try_periods(pool: Pool, random: Random, until: int) -> None:
    """Try periods from short to long, then small changes of the best one."""
    best, period, delay = math.inf, pool.instance.busiest, [0.0] * (3 * pool.instance.stages)
    for longer in periods(pool.instance):
        span = pool.time(repeating(pool.instance, longer, delay))
        best, period = min((best, period), (span, longer))
    while pool.left >= until and not pool.proven:
        new = varied(pool.instance, period, delay, random)
        span = pool.time(repeating(pool.instance, *new))
        if span <= best:
            best, (period, delay) = span, new


def _try_policies(pool: Pool, until: int) -> None:
    """Try a grid of policies, the most promising first."""
    for policy in policies(pool.instance):
        if pool.left < until or pool.proven:
            return
        pool.build(policy)


def policies(instance: Instance) -> Iterator[Policy]:
    trips = round_trips(instance)
    # The bottleneck lets a micro-batch pass every `busiest` seconds; a stage needs as many in flight as such periods
    # pass until its gradient is back. Queues on the way make that longer than the path alone.
    waits = [trip / instance.busiest if instance.busiest > 0 else math.inf for trip in trips]
    for prefer, patience in product(("backward", "turns", "forward"), (0.0, 0.5, 1.0)):
        for depth in (2.0, 3.0, 1.5, math.inf, 1.0, 1.25, 0.75):
            limit = tuple(max(1.0, math.ceil(w)) if (w := depth * wait) < math.inf else w for wait in waits)
            for reserve in (True, False) if instance.squeezed else (True,):
                yield Policy(limit, prefer, patience, reserve=reserve)


def _vary_policies(pool: Pool, random: Random, until: int) -> None:
    """Hill climbing over policies: change one that built a good order a little, go on from there if it got no worse."""
    good = [(span, policy) for span, _, policy in pool.orders if policy is not None]
    if not good:
        return
    span, current = good[0]
    while pool.left >= until and not pool.proven:
        base = current if random.random() < 0.7 else random.choice(good)[1]
        varied = _varied(base, pool.instance.microbatches, random)
        new_span = pool.build(varied)
        if new_span <= span * 1.0005:
            span, current = new_span, varied


def _varied(policy: Policy, most: int, random: Random) -> Policy:
    limit = list(policy.limit)
    for _ in range(random.choice((1, 1, 2, 3))):
        stage = random.randrange(len(limit))
        limit[stage] = max(1.0, min(limit[stage], most) + random.choice((-2, -1, 1, 2)))
    policy = replace(policy, limit=tuple(limit))
    if random.random() < 0.3:
        policy = replace(policy, patience=random.choice((0.0, 0.25, 0.5, 0.75, 1.0, 1.5)))
    if random.random() < 0.2:
        policy = replace(policy, hold=random.choice((0, 1, 2, 3, 5, 8, math.inf)))
    if random.random() < 0.2:
        policy = replace(policy, prefer=random.choice(("backward", "turns", "forward")))
    return policy
