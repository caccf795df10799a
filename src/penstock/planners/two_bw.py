"""PipeDream-2BW (Narayanan et al. 2021): width, depth, micro-batch and recompute for the best throughput that fits.

Steps: for every depth d cut the layers as evenly as can be; for every width w with w·d devices, every micro-batch b and
with and without recompute, m = batch / (b·w) micro-batches make a step, at least d of them;

    t      = max over stages of max(Tcomp + Tcomm, Treduce / m);    recompute makes Tcomp 4/3 of what it was
    memory = two versions of a stage's weights and
             d·A + d·input without recompute, A + d·input with it

and the best throughput b·w/t that fits wins. On top of the paper's two versions come gradients and optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from penstock.core.cluster import Cluster
from penstock.core.group_costs import group_all_reduce, group_transfer
from penstock.core.profile import Profile
from penstock.core.validation import whole
from penstock.planners.balance import even_cells
from penstock.planners.chain import LayerSums, straight_plan
from penstock.planners.infeasible import Need, shortage
from penstock.planners.outcome import PlanOutcome, least_memory, slowest
from penstock.planners.scaled import scaled


@dataclass(frozen=True)
class Choice:
    width: int
    bounds: tuple[int, ...]  # where the stages begin, and the end
    times: int  # b: rows of a replica's micro-batch, in units of the profile's
    steps: int  # m: micro-batches a step
    recompute: bool
    by_stage: bool  # replicas of a stage on neighbouring devices, or the stages of a pipeline

    @property
    def depth(self) -> int:
        return len(self.bounds) - 1

    @property
    def devices(self) -> list[list[int]]:
        w, d = self.width, self.depth
        return [[s * w + r if self.by_stage else r * d + s for r in range(w)] for s in range(d)]


def two_bw(profile: Profile, cluster: Cluster, *, microbatches: int) -> PlanOutcome:
    """Maximise rows a second for a batch of so many micro-batches of the profile's size.

    The plan's micro-batches may be larger than the profile's: the outcome's profile is of their size, all replicas
    together. `seconds` is what one of them takes in the steady state.
    """
    whole("microbatches", microbatches)
    chain = LayerSums.of(profile, slowest(cluster))
    room = least_memory(cluster)
    best: Choice | None = None
    pace = 0.0
    for choice in choices(chain, len(cluster.devices), microbatches):
        if memory(choice, chain) > room:
            continue
        rate = choice.times * choice.width / seconds(choice, chain, cluster)
        if rate > pace * (1 + 1e-12):
            best, pace = choice, rate
    if best is None:
        batch = microbatches * profile.samples
        raise shortage(profile, cluster, partial(_need, batch))
    whole_batch = scaled(profile, profile.samples * best.times * best.width)
    plan = straight_plan(best.bounds, best.devices, "2bw", best.steps, best.recompute)
    return PlanOutcome("2bw", plan, whole_batch, best.times * best.width / pace)


def _need(batch: int, profile: Profile, devices: int) -> Need:
    """Return the least memory of any choice, for a batch of so many rows."""
    chain = LayerSums.of(profile)
    every = choices(chain, devices, max(1, batch // profile.samples))
    least = min(every, key=lambda choice: memory(choice, chain))
    again = ", recomputed" if least.recompute else ""
    return Need(memory(least, chain), f"with {least.depth} stage(s) of {least.width} device(s){again} and two versions")


def choices(chain: LayerSums, devices: int, microbatches: int) -> Iterator[Choice]:
    """Yield every combination that makes whole micro-batches, at least as many as stages."""
    costs = np.diff(chain.forward + chain.backward)
    for depth in range(1, min(devices, chain.layers) + 1):
        bounds = tuple(even_cells(costs.tolist(), depth)[0])
        for width in range(1, devices // depth + 1):
            if microbatches % width:
                continue
            each = microbatches // width
            for times in (b for b in range(1, each // depth + 1) if each % b == 0):
                for recompute in (False, True):
                    choice = partial(Choice, width, bounds, times, each // times, recompute)
                    yield choice(by_stage=True)
                    if width > 1 and depth > 1:
                        yield choice(by_stage=False)


def seconds(choice: Choice, chain: LayerSums, cluster: Cluster) -> float:
    """Return t: the slowest stage, with what it sends forward and back, or the reduction that each step must hide."""
    slow, groups = 0.0, choice.devices
    for s, (a, b) in enumerate(pairwise(choice.bounds)):
        compute = chain.forward[b] - chain.forward[a] + chain.backward[b] - chain.backward[a]
        compute *= choice.times * (4 / 3 if choice.recompute else 1.0)
        sends = 0.0
        for other, at in ((s - 1, a), (s + 1, b)):
            if 0 <= other < choice.depth:
                each, wait = group_transfer(cluster, groups[s], groups[other])
                sends += each * chain.cut[at] * choice.times * choice.width + wait
        each, wait = group_all_reduce(cluster, groups[s])
        reduction = each * (chain.parameters[b] - chain.parameters[a]) + wait
        slow = max(slow, compute + sends, reduction / choice.steps)
    return float(slow)


def memory(choice: Choice, chain: LayerSums) -> float:
    """Return the bytes on the fullest device."""
    most, depth = 0.0, choice.depth
    for a, b in pairwise(choice.bounds):
        weights = chain.standing[b] - chain.standing[a] + chain.parameters[b] - chain.parameters[a]
        kept = chain.kept[b] - chain.kept[a]
        live = kept if choice.recompute else depth * kept
        most = max(most, weights + choice.times * (live + depth * chain.cut[a]))
    return float(most)
