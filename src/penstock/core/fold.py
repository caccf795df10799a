"""Replicas that split every micro-batch do the same at the same time: one slot can stand for all of a rank's.

Its seconds and activations are a replica's share, on the slowest of the devices; a hand-over lasts until the last
replica has its rows. A stage's reduction comes right before its update, which takes as much longer; where a rank has
several stages, the first reductions run beside the compute, and there it takes two slots that meet. For equal devices
and links that nobody shares this is exact, and a thousand devices become a few slots.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.core.between import all_reduce, hand_over
from penstock.core.cluster import Cluster
from penstock.core.cost import Costs, plan_costs
from penstock.core.links import Links, pair_links
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.shape import Shape

FEW = 2  # replicas that are simulated as they are


def folded(plan: Plan) -> Plan:
    """The same plan with one replica of every rank, or two."""
    if max(plan.replicas) <= FEW:
        return plan
    some = 1 if plan.chunks == 1 else 2
    return replace(plan, devices=tuple(rank[:some] for rank in plan.devices))


def folded_costs(shape: Shape, profile: Profile, plan: Plan, cluster: Cluster) -> Costs:
    """Costs of the folded plan, whose shape is given, with those of all its replicas in them."""
    some = folded(plan)
    few = plan_costs(shape, profile, some, cluster)
    if some is plan:
        return few
    groups = [tuple(slot[0] for slot in plan.devices[rank]) for rank in plan.placement]
    share = np.array([len(some.devices[rank]) for rank in plan.placement]) / np.array([len(group) for group in groups])
    foot = few.footprint
    reductions = [all_reduce(cluster, group) for group in groups]
    reduce = np.array([each * size + wait for (each, wait), size in zip(reductions, foot.gradients, strict=True)])
    slow = np.array([1.0 / min(cluster.devices[d].speed for slot in rank for d in slot) for rank in plan.devices])
    alone = shape.stage_replicas == 1
    return replace(
        few,
        forward=few.forward * share,
        input_grad=few.input_grad * share,
        weight_grad=few.weight_grad * share,
        full_backward=None if few.full_backward is None else few.full_backward * share,
        host_copy=None if few.host_copy is None else few.host_copy * share,
        update=few.update + np.where(alone, reduce / slow[shape.stage_rank], 0.0),
        reduce=np.where(alone, 0.0, reduce),
        slowdown=slow[shape.slot_rank],
        links=_links(shape, profile, plan, groups, cluster),
        footprint=replace(
            foot,
            activations=foot.activations * share,
            until_weight=foot.until_weight * share,
            inputs=foot.inputs * share,
        ),
    )


def _links(shape: Shape, profile: Profile, plan: Plan, groups: list[tuple[int, ...]], cluster: Cluster) -> Links:
    links, crossing = pair_links(shape, np.zeros(len(shape.edges))), profile.crossing(plan.cuts)
    seconds, latency, held = links.seconds.copy(), links.latency.copy(), links.held.copy()
    lanes_of: dict[int, list[int]] = {}
    for lane, edge in zip(shape.lanes.number.tolist(), shape.lanes.edge.tolist(), strict=True):
        lanes_of.setdefault(edge, []).append(lane)
    for edge, lanes in lanes_of.items():
        a, b = shape.edges[edge]
        for way, (source, target) in enumerate(((a, b), (b, a))):
            each, wait = hand_over(cluster, groups[source], groups[target])
            seconds[way, lanes], latency[way, lanes] = each * crossing.get((a, b), 0.0), wait
            level = cluster.levels[cluster.meeting_level(groups[source][0], groups[target][0])]
            held[way, lanes] = seconds[way, lanes] if level.blocking else 0.0
    return replace(links, seconds=seconds, latency=latency, held=held)
