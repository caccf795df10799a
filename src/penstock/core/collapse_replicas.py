"""Simulate one or two replicas of each rank in place of all of them.

Replicas that split every micro-batch do the same work at the same time, so one slot can represent all slots of a rank.
Its seconds and activations are one replica's share, on the slowest of the devices; a transfer lasts until the last
replica has its rows. A stage's reduction comes right before its update, so its seconds are added to the update's. Where
a rank has several stages, the first reductions overlap with compute, which takes two slots to simulate. The result is
exact for equal devices and links that are not shared, and a thousand devices become a costs slots.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.core.cluster import Cluster
from penstock.core.cost import Costs, plan_costs
from penstock.core.group_costs import group_all_reduce, group_transfer
from penstock.core.links import Links, pair_links
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.shape import Shape

MOST_SLOTS = 2  # replicas of a rank that are simulated one by one


def collapse_replicas(plan: Plan) -> Plan:
    """Return the same plan with at most one replica of every rank, or two if ranks have several stages."""
    if max(plan.replicas) <= MOST_SLOTS:
        return plan
    most = 1 if plan.chunks == 1 else 2
    return replace(plan, devices=tuple(rank[:most] for rank in plan.devices))


def collapsed_costs(shape: Shape, profile: Profile, plan: Plan, cluster: Cluster) -> Costs:
    """Return the costs of the collapsed plan, of shape `shape`, which represent those of all replicas."""
    collapsed = collapse_replicas(plan)
    costs = plan_costs(shape, profile, collapsed, cluster)
    if collapsed is plan:
        return costs
    groups = [tuple(slot[0] for slot in plan.devices[rank]) for rank in plan.placement]
    replicas = np.array([len(collapsed.devices[rank]) for rank in plan.placement])
    share = replicas / np.array([len(group) for group in groups])
    foot = costs.footprint
    reductions = [group_all_reduce(cluster, group) for group in groups]
    reduce = np.array([rate * size + wait for (rate, wait), size in zip(reductions, foot.gradients, strict=True)])
    slow = np.array([1.0 / min(cluster.devices[d].speed for slot in rank for d in slot) for rank in plan.devices])
    alone = shape.stage_replicas == 1
    return replace(
        costs,
        forward=costs.forward * share,
        input_grad=costs.input_grad * share,
        weight_grad=costs.weight_grad * share,
        full_backward=None if costs.full_backward is None else costs.full_backward * share,
        host_copy=None if costs.host_copy is None else costs.host_copy * share,
        update=costs.update + np.where(alone, reduce / slow[shape.stage_rank], 0.0),
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
            rate, wait = group_transfer(cluster, groups[source], groups[target])
            seconds[way, lanes], latency[way, lanes] = rate * crossing.get((a, b), 0.0), wait
            level = cluster.levels[cluster.meeting_level(groups[source][0], groups[target][0])]
            held[way, lanes] = seconds[way, lanes] if level.blocking else 0.0
    return replace(links, seconds=seconds, latency=latency, held=held)
