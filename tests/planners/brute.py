"""Planners by brute force: every cut, replica count and placement, written to be believed and not to be fast."""

from __future__ import annotations

from itertools import combinations
from math import ceil, inf

from penstock import Layer, Profile


def compositions(total, parts):
    """All ways to write `total` as so many positive parts, in order."""
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True))


def all_cells(costs, count):
    """All ways to cut a list into so many runs."""
    for sizes in compositions(len(costs), count):
        at, cells = 0, []
        for size in sizes:
            cells.append(sum(costs[at : at + size]))
            at += size
        yield cells


def random_profile(random, layers, branching=False):
    """Small whole numbers, so that sums are exact; branching: each layer is fed by one or two earlier ones."""
    made = tuple(
        Layer(
            f"L{at}",
            random.randint(1, 9),
            random.randint(0, 9),
            random.randint(0, 9),
            output_bytes=random.randint(0, 20),
            kept_bytes=random.randint(0, 20),
            parameter_bytes=random.randint(0, 20) * random.choice((1, 1, 5)),
            optimizer_bytes=random.randint(0, 10),
        )
        for at in range(layers)
    )
    edges = {(at, at + 1) for at in range(layers - 1)}
    if branching:
        edges = {(a, b) for b in range(1, layers) for a in random.sample(range(b), min(b, random.randint(1, 2)))}
    return Profile(made, tuple(sorted(edges)))


def downsets(profile):
    """Every set of layers that holds all that feeds its members, by trying all subsets."""
    layers = range(len(profile.layers))
    subsets = (frozenset(c) for size in range(len(layers) + 1) for c in combinations(layers, size))
    return [d for d in subsets if all(a in d for a, b in profile.edges if b in d)]


REDUCTION = {
    "paper": lambda compute, w, m, rate: max(compute, 2 * (m - 1) * w / rate) / m,
    "text": lambda compute, w, m, rate: max(compute, 2 * (m - 1) * w / (m * rate)) / m,
    "code": lambda compute, w, m, rate: (compute + 4 * (m - 1) * w / (m * rate)) / m,
}


class PipeDream:
    """The best pipeline by trying every sequence of stages at every level."""

    def __init__(self, profile, levels, memory, constant):
        self.profile, self.levels, self.memory = profile, levels, memory
        self.stage_seconds = REDUCTION[constant]
        self.sets = downsets(profile)
        self.known = {}

    def best(self):
        whole = frozenset(range(len(self.profile.layers)))
        return self.pipeline(len(self.levels), frozenset(), whole, 1)

    def pipeline(self, k, start, end, ahead):
        """The least slowest stage between two sets on all components of level k (0: on one device)."""
        layers = [self.profile.layers[at] for at in end - start]
        if k == 0:
            standing = sum(x.parameter_bytes + x.buffer_bytes + x.optimizer_bytes for x in layers)
            each = sum(x.parameter_bytes + x.kept_bytes for x in layers)
            return sum(x.seconds for x in layers) if standing + ahead * each <= self.memory else inf
        key = (k, start, end, ahead)
        if key not in self.known:
            level = self.levels[k - 1]
            self.known[key] = self.stages(k, level, start, end, level.size, ahead)
        return self.known[key]

    def stages(self, k, level, start, end, left, ahead):
        """Try every first stage and every number of replicas for it, then the same for what is left."""
        found = inf
        for cut in self.sets:
            if not (start < cut <= end):
                continue
            for m in range(1, left + 1):
                if (cut == end) != (m == left):
                    continue
                depth = ceil(((ahead - 1) * level.size + left) / m) if self.memory < inf else 1
                compute = self.pipeline(k - 1, start, cut, depth)
                weights = sum(self.profile.layers[at].parameter_bytes for at in cut - start)
                time = self.stage_seconds(compute, weights, m, level.reduce_rate(m))
                if cut < end:
                    time = max(time, 2 * self.leaving(cut) / level.bandwidth)
                    time = max(time, self.stages(k, level, cut, end, left - m, ahead))
                found = min(found, time)
        return found

    def leaving(self, cut):
        crossing = (x for x in self.profile.outputs if x.source in cut and not cut.issuperset(x.readers))
        return sum(x.bytes for x in crossing)
