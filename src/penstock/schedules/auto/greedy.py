"""A greedy builder: every rank, whenever it is free, starts the best of what is ready.

The rules follow the automatic schedule of Qi et al. 2023: forwards until memory or a limit is reached or the first
backward arrives, then input gradients and forwards in turn, weight gradients where a rank would wait. Which of these
comes first is a policy, and the search tries many.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from penstock.schedules.auto.instance import Instance, Order


@dataclass(frozen=True)
class Policy:
    """Parameters of one greedy run."""

    limit: tuple[float, ...]  # by stage: most micro-batches between forward and input gradient
    prefer: str = "backward"  # or "turns" (what the rank did not do last), or "forward"
    patience: float = 1.0  # a weight gradient starts if the next known arrival is at least this many of its times away
    hold: float = math.inf  # weight gradients that may wait on a rank while forwards could run
    reserve: bool = True  # keep room for the later stages of a rank, so that no order runs into a deadlock
    deep_first: bool = True  # of several forwards (input gradients), the one of the later (earlier) stage first


class Builder:
    """The state of one greedy run."""

    def __init__(self, instance: Instance, policy: Policy) -> None:
        self.instance, self.policy = instance, policy
        self.order: Order = [[] for _ in range(instance.ranks)]
        self.done = [0] * (3 * instance.stages)
        self.arrived: list[list[float]] = [[] for _ in range(instance.lanes)]
        self.free = [0.0] * instance.links
        self.level = [0.0] * instance.ranks
        self.pending = [0] * instance.ranks  # weight gradients that wait
        self.busy_until = [0.0] * instance.ranks
        self.last_was_forward = [False] * instance.ranks
        self.reserve = _reserves(instance) if policy.reserve else [0.0] * instance.stages

    def run(self) -> Order | None:
        """Return the order, or None where the policy runs into a deadlock."""
        left = self.instance.actions
        events = [(0.0, rank) for rank in range(self.instance.ranks)]
        while events:
            now, rank = heapq.heappop(events)
            if now < self.busy_until[rank]:
                continue
            code, again = self._choose(rank, now)
            if code < 0:
                if again < math.inf:
                    heapq.heappush(events, (again, rank))
                continue
            left -= 1
            end = now + self.instance.seconds[code]
            self.busy_until[rank] = end
            heapq.heappush(events, (end, rank))
            for other in self._start(rank, code, end):
                heapq.heappush(events, other)
        return self.order if left == 0 else None

    def _start(self, rank: int, code: int, end: float) -> list[tuple[float, int]]:
        """Do one action; returns the ranks that it wakes, and when."""
        instance, kind = self.instance, code // self.instance.stages
        self.order[rank].append(code)
        self.done[code] += 1
        self.level[rank] += instance.grab[code] + instance.drop[code]
        self.pending[rank] += (0, 1, -1)[kind]
        if kind < 2:
            self.last_was_forward[rank] = kind == 0
        woken = []
        for lane, link, busy, latency in instance.sends[code]:
            begin = end
            if link >= 0:
                begin = max(end, self.free[link])
                self.free[link] = begin + busy
            self.arrived[lane].append(begin + busy + latency)
            woken.append((begin + busy + latency, instance.readers[lane]))
        return woken

    def _ready(self, code: int) -> float:
        """Return when the next action of a code has all its tensors, as far as is decided now."""
        number, when = self.done[code], 0.0
        if number >= self.instance.microbatches:
            return math.inf
        for lane in self.instance.needs[code]:
            queue = self.arrived[lane]
            if number >= len(queue):
                return math.inf
            when = max(when, queue[number])
        return when

    def _choose(self, rank: int, now: float) -> tuple[int, float]:
        """Return the code to start now, or -1 and when to look again (infinity: when something arrives)."""
        policy, owned = self.policy, self.instance.owned[rank]
        forward, soon_f, full = self._best_forward(rank, now, owned)
        back, soon_b = self._best_backward(rank, now, owned)
        weight = self._oldest_weight(owned) if self.pending[rank] else -1
        first_back = policy.prefer == "backward" or (policy.prefer == "turns" and self.last_was_forward[rank])
        if back >= 0 and (forward < 0 or first_back):
            return back, now
        if forward >= 0:
            return (weight if self.pending[rank] > policy.hold else forward), now
        soon = min(soon_f, soon_b)
        if weight >= 0 and (full or soon - now >= policy.patience * self.instance.seconds[weight]):
            return weight, now
        return -1, soon

    def _best_forward(self, rank: int, now: float, owned: list[int]) -> tuple[int, float, bool]:
        """Return a forward to start now or -1, when the next one can start, and whether memory alone forbids one."""
        instance, soon, full = self.instance, math.inf, False
        for s in reversed(owned) if self.policy.deep_first else owned:
            if self.done[s] - self.done[instance.stages + s] >= self.policy.limit[s]:
                continue
            when = self._ready(s)
            if self.level[rank] + instance.grab[s] + self.reserve[s] > instance.cap[rank]:
                full = full or when <= now
            elif when <= now:
                return s, now, False
            else:
                soon = min(soon, when)
        return -1, soon, full

    def _best_backward(self, rank: int, now: float, owned: list[int]) -> tuple[int, float]:
        instance, soon = self.instance, math.inf
        for s in owned if self.policy.deep_first else reversed(owned):
            code = instance.stages + s
            when = self._ready(code)
            if when <= now and self.level[rank] + instance.grab[code] <= instance.cap[rank]:
                return code, now
            if when > now:
                soon = min(soon, when)
        return -1, soon

    def _oldest_weight(self, owned: list[int]) -> int:
        """Return the weight gradient of the stage that lags behind most, which frees its memory first."""
        stages, done = self.instance.stages, self.done
        stage = max(owned, key=lambda s: done[stages + s] - done[2 * stages + s])
        return 2 * stages + stage


def _reserves(instance: Instance) -> list[float]:
    """Return by stage the memory to keep free after its forward, so that the oldest micro-batch can always go on.

    Stages of a rank run in model order, oldest micro-batch first; if a forward leaves room for the later stages of its
    rank, the oldest micro-batch finds that room when it comes to them.
    """
    reserve = [0.0] * instance.stages
    for owned in instance.owned:
        again = max(instance.grab[instance.stages + s] for s in owned)  # made a second time during a backward
        for at, s in enumerate(owned):
            reserve[s] = sum(instance.grab[later] for later in owned[at + 1 :]) + again
    return reserve
