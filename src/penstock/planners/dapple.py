"""DAPPLE (Fan et al. 2021): the step of least latency over cuts, device counts and three placements.

A state is (first j layers placed, devices used per machine); the rest is one stage on the devices left. Steps: start
with nothing placed; from each state place one stage more, for every end of it, every count and every placement; keep
for each state the prefixes with the least latency L of the whole. The answer is the least L met on the way whose stages
all fit. The paper keeps one prefix a state (`keep=1`) and misses the optimum now and then, since L does not split into
parts that could be minimised alone; `keep=None` drops only what a bound rules out and is exact, for small cases.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf

from penstock.core.cluster import Cluster
from penstock.core.profile import Profile
from penstock.core.validation import whole
from penstock.planners.chain import LayerSums, straight_plan
from penstock.planners.dapple_prefixes import Placed
from penstock.planners.dapple_search import Search
from penstock.planners.infeasible import Rule, least_need, shortage
from penstock.planners.outcome import PlanOutcome


def dapple(
    profile: Profile, cluster: Cluster, *, microbatches: int, keep: int | None = 32, policy: str = "pa"
) -> PlanOutcome:
    """Minimise L for so many micro-batches of the profile's size; `policy` is the schedule's."""
    whole("microbatches", microbatches)
    if keep is not None:
        whole("keep", keep)
    chain = LayerSums.of(profile)
    search = Search(chain, cluster, microbatches, keep)
    search.run()
    if search.plan is None:
        one = Rule(slope=0, base=1)  # early backward holds one micro-batch at least
        raise shortage(profile, cluster, partial(least_need, one), partial(least_need, replace(one, recompute=True)))
    bounds = [0, *(end for end, _ in search.plan)]
    options: list[tuple[str, object]] = [("policy", policy)]
    cap = _live(chain, cluster, search.plan)
    if cap < len(search.plan):
        options.insert(0, ("cap", cap))
    devices = [placed for _, placed in search.plan]
    plan = straight_plan(bounds, devices, "dapple", microbatches, options=tuple(options))
    return PlanOutcome("dapple", plan, profile, search.best)


def _live(chain: LayerSums, cluster: Cluster, placed: Placed) -> int:
    """Return D, the micro-batches whose activations every stage has room for."""
    most, first = inf, 0
    for last, devices in placed:
        room = min(cluster.devices[d].memory for d in devices) - (chain.standing[last] - chain.standing[first])
        each = (chain.kept[last] - chain.kept[first]) / len(devices)
        if each and room < inf:
            most = min(most, room // each)
        first = last
    return max(1, int(min(most, len(placed) * 2)))
