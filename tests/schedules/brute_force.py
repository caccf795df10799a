"""The best makespan of a small straight pipeline, by looking at every order: an oracle that shares no code with `auto`.

Micro-batches are alike, so forwards, input and weight gradients each run in micro-batch order. What has been done is
then three counts a rank, and memory depends on the counts alone. Orders that reach the same counts differ only in
times: when each rank and link is free, and when the tensors under way arrive. If none of them is later, nothing that
follows is later, so of two such states the later one is dropped. All else is kept: the search is exhaustive.
"""

from itertools import product


class Pipeline:
    """Seconds by rank, seconds of the link behind each rank, memory caps in micro-batches, AW as a part of A."""

    def __init__(self, m, forward, input_grad, weight_grad, transfer, cap, held):
        self.m, self.p = m, len(forward)
        self.seconds = (forward, input_grad, weight_grad)
        self.transfer, self.cap, self.held = transfer, cap, held

    def may(self, counts, rank, op):
        """Whether order and memory let the rank do one more of an operation (0 F, 1 I, 2 W)."""
        f, i, w = counts[rank]
        if op == 0:
            room = (f - i + 1) + (i - w) * self.held <= self.cap[rank] + 1e-9
            return f < self.m and room and (rank == 0 or counts[rank - 1][0] > f)
        if op == 1:
            return i < f and (rank == self.p - 1 or counts[rank + 1][1] > i)
        return w < i

    def step(self, state, rank, op):
        """The times after one more action. State: by rank, by link down, by link up: (free, arrivals not yet used)."""
        ranks, down, up = list(state[0]), list(state[1]), list(state[2])
        start = ranks[rank]
        for kind, links, at in ((0, down, rank - 1), (1, up, rank)):
            if op == kind and 0 <= at < self.p - 1:
                free, arrivals = links[at]
                start = max(start, arrivals[0])
                links[at] = (free, arrivals[1:])
        end = ranks[rank] = start + self.seconds[op][rank]
        for kind, links, at in ((0, down, rank), (1, up, rank - 1)):
            if op == kind and 0 <= at < self.p - 1:
                free, arrivals = links[at]
                arrival = (max(free, end) if self.transfer[at] else end) + self.transfer[at]
                links[at] = (arrival, (*arrivals, arrival))
        return tuple(ranks), tuple(down), tuple(up)

    def least_end(self, counts, state):
        """No order that goes on from here ends earlier: each rank still has its work to do."""
        left = (sum((self.m - n) * self.seconds[op][r] for op, n in enumerate(counts[r])) for r in range(self.p))
        return max(free + work for free, work in zip(state[0], left, strict=True))

    def start(self):
        return (0.0,) * self.p, ((0.0, ()),) * (self.p - 1), ((0.0, ()),) * (self.p - 1)


def best_makespan(pipeline, at_most=float("inf")):
    """The least makespan of any order, or `at_most` if no order is shorter than that."""
    level = {((0, 0, 0),) * pipeline.p: [pipeline.start()]}
    for _ in range(3 * pipeline.m * pipeline.p):
        found = {}
        for counts, states in level.items():
            for rank, op in product(range(pipeline.p), range(3)):
                if pipeline.may(counts, rank, op):
                    done = tuple(n + (k == op) for k, n in enumerate(counts[rank]))
                    after = (*counts[:rank], done, *counts[rank + 1 :])
                    found.setdefault(after, set()).update(pipeline.step(state, rank, op) for state in states)
        level = {}
        for counts, states in found.items():
            alive = (state for state in states if pipeline.least_end(counts, state) < at_most * (1 - 1e-12))
            level[counts] = _not_later(alive)
    return min((max(state[0]) for states in level.values() for state in states), default=at_most)


def _flat(state):
    links = (value for links in state[1:] for free, arrivals in links for value in (free, *arrivals))
    return (*state[0], *links)


def _not_later(states):
    """Those states that no other one precedes in every time."""
    kept = []
    for flat, state in sorted((_flat(state), state) for state in states):
        if not any(all(a <= b for a, b in zip(other, flat, strict=True)) for other, _ in kept):
            kept.append((flat, state))
    return [state for _, state in kept]
