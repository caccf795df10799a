"""A bound by relaxation: the earliest that every forward can start and every input gradient can end, in any order.

Micro-batches run in order (see instance.py), so times of micro-batch j follow from those before it. Each line below
drops some of what a rank must do and keeps the rest, so no order is faster. With, for one stage, F, I, W its seconds, n
the micro-batches that its memory holds between forward and input gradient, q the weight gradients that may wait while
an input gradient runs, f(j) the start of forward j and e(j) the end of input gradient j:

    f(j) >= f(j-1) + F,  its tensor,  e(j-n)                              in order, and within memory
    f(j) >= the lesser of e(j-n) + W and e(j-n+1)                         where n fill memory: no weight gradient waits
    f(j) >= f(i) + (j-i) F + (j-i-n+1) I            j - i >= n            input gradients that must have made room
    e(j) >= e(j-1) + I,  its tensor + I,  f(j) + F + I
    e(j) >= f(i) + (j-i+1)(F+I)                     i <= j                forwards and input gradients i..j lie between
    e(j) >= f(i) + (j-i+1)(F+I) + (j-q-i) W         j - i >= q            and those weight gradients that cannot wait
    e(j) >= e(i) + (j-i-n+1) F + (j-i) I            j - i >= n            at e(i) at most i + n forwards have run
    end  >= f(i) + (m-i)(F+I+W),  e(i) + (m-i-n) F + (m-i-1) I + (m-i) W,  e(m-1) + what must follow it
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock.schedules.auto.instance import Instance


@dataclass
class _StageBounds:
    """The bounds of one stage as micro-batches go by."""

    forward: float
    back: float
    weight: float
    flight: int  # n
    waiting: int  # q
    filled: bool  # whether n leave no room for a weight gradient that waits
    count: int  # m
    tail: float
    starts: list[float] = field(default_factory=list)  # f
    ends: list[float] = field(default_factory=list)  # e
    emptied: float = -math.inf  # greatest f(i) + (j-i) F + (j-i-n+1) I
    between: float = -math.inf  # greatest f(i) + (j-i+1)(F+I)
    pressed: float = -math.inf  # the same with the weight gradients that cannot wait
    refill: float = -math.inf  # greatest e(i) + (j-i-n+1) F + (j-i) I
    finish: float = 0.0

    def start(self, ready: float) -> float:
        j, n = len(self.starts), self.flight
        begin = max(ready, self.starts[-1] + self.forward if j else 0.0)
        self.emptied += self.forward + self.back
        if j >= n:
            self.emptied = max(self.emptied, self.starts[j - n] + n * self.forward + self.back)
            begin = max(begin, self._room(j), self.emptied)
        self.starts.append(begin)
        self.finish = max(self.finish, begin + (self.count - j) * (self.forward + self.back + self.weight) + self.tail)
        return begin + self.forward

    def _room(self, j: int) -> float:
        """Return when memory lets forward j start."""
        oldest, second = j - self.flight, j - self.flight + 1
        if not self.filled:
            return self.ends[oldest]
        weight_done = self.ends[oldest] + self.weight
        return min(weight_done, self.ends[second]) if second < len(self.ends) else weight_done

    def end(self, ready: float) -> float:
        j, both, n, q = len(self.ends), self.forward + self.back, self.flight, self.waiting
        self.between = max(self.between, self.starts[j]) + both
        self.pressed += both + self.weight
        if j >= q:
            self.pressed = max(self.pressed, self.starts[j - q] + (q + 1) * both)
        self.refill += both
        if j >= n:
            self.refill = max(self.refill, self.ends[j - n] + self.forward + n * self.back)
        last = self.ends[-1] + self.back if j else 0.0
        end = max(ready + self.back, last, self.between, self.pressed, self.refill)
        self.ends.append(end)
        left = self.count - j
        rest = max(0, left - n) * self.forward + (left - 1) * self.back + left * self.weight
        self.finish = max(self.finish, end + rest + self.tail)
        return end


def relaxed(instance: Instance, behind: list[float]) -> float:
    """Return the bound; `behind[code]` is the longest path behind the end of a code."""
    stages = [_stage(instance, s) for s in range(instance.stages)]
    free = [0.0] * instance.lanes  # when a lane has carried its last tensor
    arrival = [0.0] * instance.lanes
    for _ in range(instance.microbatches):
        for s, stage in enumerate(stages):
            ready = max((arrival[lane] for lane in instance.needs[s]), default=0.0)
            _send(instance, s, stage.start(ready), free, arrival)
        for s, stage in reversed(list(enumerate(stages))):
            code = instance.stages + s
            ready = max(arrival[lane] for lane in instance.needs[code])
            _send(instance, code, stage.end(ready), free, arrival)
    last = max(stage.ends[-1] + behind[instance.stages + s] for s, stage in enumerate(stages))
    return max(last, *(stage.finish for stage in stages))


def _send(instance: Instance, code: int, end: float, free: list[float], arrival: list[float]) -> None:
    for lane, link, busy, latency in instance.sends[code]:
        begin = max(end, free[lane]) if link >= 0 else end
        free[lane] = begin + busy
        arrival[lane] = begin + busy + latency


def _stage(instance: Instance, s: int) -> _StageBounds:
    """Return the bounds of a stage; memory of its rank's other stages is left out, so they get weaker, never wrong."""
    m, stages = instance.microbatches, instance.stages
    room, held = instance.cap[instance.rank[s]], -instance.drop[2 * stages + s]
    kept, during = instance.grab[s], instance.grab[s] + instance.grab[stages + s]
    flight = max(1, _whole_parts(room, kept, m))
    return _StageBounds(
        forward=instance.seconds[s],
        back=instance.seconds[stages + s],
        weight=instance.seconds[2 * stages + s],
        flight=flight,
        waiting=max(0, _whole_parts(room - during, held, m)),
        filled=flight * kept + held > room,
        count=m,
        tail=instance.tail[instance.rank[s]],
    )


def _whole_parts(room: float, size: float, most: int) -> int:
    """Return how many of a size fit, at most `most`."""
    return most if size <= 0 or room >= most * size else math.floor(room / size)
