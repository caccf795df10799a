"""Seconds and bytes of a stage, for planners and simulator alike (links.py has those of transfers)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from penstock.core import validation
from penstock.core.action import Op
from penstock.core.arguments import named_fields
from penstock.core.cluster import Cluster
from penstock.core.links import FloatArray, Links, cluster_links, pair_links, ring_seconds
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.schedule import BoolArray
from penstock.core.shape import Law, Shape
from penstock.core.validation import Numbers
from penstock.errors import InputError


@dataclass(frozen=True, eq=False)
class Footprint:
    """Memory of each stage for one micro-batch on one device, in bytes or in units of one stage's activations."""

    activations: FloatArray  # A: kept from forward to backward
    until_weight: FloatArray  # AW: the part that is kept until the weight gradient
    inputs: FloatArray  # kept instead of A when the forward will be recomputed
    weights: FloatArray  # one version of the weights
    gradients: FloatArray
    optimizer: FloatArray
    buffers: FloatArray | None = None  # one copy, however many weight versions


@named_fields
@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds of every stage for one micro-batch on one device, of its reduction and update, and of every lane.

    A replica that handles a share of the rows needs that share of the seconds and of the activations. A stage that
    offloads copies its activations to host memory during its forward, and back during its backward; neither ends
    before its copy does.
    """

    forward: FloatArray
    input_grad: FloatArray
    weight_grad: FloatArray
    update: FloatArray
    reduce: FloatArray
    recompute: BoolArray
    slowdown: FloatArray  # of each slot
    links: Links
    footprint: Footprint
    overlap: float = 1.0  # seconds of F&B, as a fraction of F + B
    host_copy: FloatArray | None = None  # seconds, one way; 0 for a stage that does not offload, None if no stage does
    full_backward: FloatArray | None = None  # of B, where that differs from I + W

    @property
    def backward(self) -> FloatArray:
        """Seconds of both gradients computed together, by stage."""
        return self.input_grad + self.weight_grad if self.full_backward is None else self.full_backward

    def seconds(self, op: Op) -> FloatArray:
        """Return the seconds of F, B, I or W by stage: with the recomputed forward, and no less than the copy's."""
        single = {Op.F: self.forward, Op.I: self.input_grad, Op.W: self.weight_grad}
        seconds = self.backward if op is Op.B else single[op]
        if op in (Op.B, Op.I):
            seconds = seconds + np.where(self.recompute, self.forward, 0.0)
        if self.host_copy is None or op is Op.W:
            return seconds
        longest: FloatArray = np.maximum(seconds, self.host_copy)
        return longest

    @property
    def offloads(self) -> BoolArray:
        """Mask of the stages that offload their activations between forward and backward."""
        return np.zeros(len(self.recompute), dtype=bool) if self.host_copy is None else self.host_copy > 0


def shares(shape: Shape) -> FloatArray:
    """Return, by stage, the fraction of a micro-batch's rows that one replica handles."""
    return np.ones(shape.stages) if shape.turns else 1.0 / shape.stage_replicas


def per_rank(shape: Shape, what: str, numbers: Numbers) -> FloatArray:
    """Return one number per stage, from one number for all ranks or one per rank, divided equally among its chunks."""
    values = validation.numbers(what, numbers)
    if values.shape not in ((1,), (shape.ranks,)):
        raise InputError(
            f"{what} to be one number or one for each of {shape.ranks} stages", values.tolist(), "give either"
        )
    per_stage: FloatArray = (values if len(values) == 1 else values[shape.stage_rank]) / shape.rank_chunks
    return per_stage


def _per_boundary(shape: Shape, numbers: Numbers) -> FloatArray:
    """Return the transfer seconds of every edge, from one number or one per boundary: r is between ranks r and r + 1.

    With chunks, boundary p - 1 joins the last rank and the first. A tensor that skips ranks costs as much as the
    boundary after its sender.
    """
    values = validation.numbers("transfer", numbers)
    ends = [(shape.placement[a], shape.placement[b]) for a, b in shape.edges]
    is_ring = shape.ranks > 2 and any(abs(a - b) == shape.ranks - 1 for a, b in ends)
    allowed = ((1,), (shape.ranks,)) if is_ring else ((1,), (shape.ranks,), (shape.ranks - 1,))
    if values.shape not in allowed:
        why = ": the last joins the last rank and the first" if is_ring else ""
        raise InputError(
            f"transfer to be one number or one for each of {shape.ranks} stages{why}", values.tolist(), "give either"
        )
    if values.shape == (1,):
        return np.full(len(shape.edges), values[0])
    ring = np.append(values, 0.0) if len(values) == shape.ranks - 1 else values
    return np.array([ring[min(a, b)] if abs(a - b) == 1 else ring[a] for a, b in ends])


class FlatCosts(TypedDict, total=False):
    """Keyword arguments of `flat_costs`, for type checkers."""

    forward: Numbers
    input_grad: Numbers
    weight_grad: Numbers
    transfer: Numbers
    update: Numbers
    reduce: Numbers
    weight_grad_memory: float
    recompute: bool
    recompute_memory: float
    overlap: float


def flat_costs(
    shape: Shape,
    *,
    forward: Numbers = 1.0,
    input_grad: Numbers = 1.0,
    weight_grad: Numbers = 1.0,
    transfer: Numbers = 0.0,
    update: Numbers = 0.0,
    reduce: Numbers = 0.0,
    weight_grad_memory: float = 0.5,
    recompute: bool = False,
    recompute_memory: float = 0.0,
    overlap: float = 1.0,
) -> Costs:
    """Return costs from numbers that hold for whole ranks, with activations in units of one rank's A."""
    for what, value in (("weight_grad_memory", weight_grad_memory), ("recompute_memory", recompute_memory)):
        if not 0 <= validation.numbers(what, value)[0] <= 1:
            raise InputError(f"{what} to be a fraction of A between 0 and 1", value, f"correct {what}")
    if not 0 < validation.numbers("overlap", overlap)[0] <= 1:
        raise InputError("overlap to be above 0 and at most 1", overlap, "give F&B's seconds as a fraction of F + B")
    activations = per_rank(shape, "activations", 1.0)
    zeros = np.zeros(shape.stages)
    return Costs(
        forward=per_rank(shape, "forward", forward),
        input_grad=per_rank(shape, "input_grad", input_grad),
        weight_grad=per_rank(shape, "weight_grad", weight_grad),
        update=per_rank(shape, "update", update),
        reduce=per_rank(shape, "reduce", reduce),
        recompute=np.full(shape.stages, validation.truth("recompute", recompute)),
        slowdown=np.ones(shape.slots),
        links=pair_links(shape, _per_boundary(shape, transfer)),
        footprint=Footprint(
            activations, activations * weight_grad_memory, activations * recompute_memory, zeros, zeros, zeros
        ),
        overlap=float(overlap),  # kernels are compiled anew for an int
    )


def plan_costs(shape: Shape, profile: Profile, plan: Plan, cluster: Cluster) -> Costs:
    """Return the costs of a plan: the sum of each stage's layers, on the devices and links that the plan assigns.

    A stage's copy to host memory takes as long as that of its slowest replica.
    """
    if plan.stages[-1].last != len(profile.layers) - 1:
        raise InputError(
            f"a plan of the profile's {len(profile.layers)} layers", plan.stages[-1].last + 1, "plan this profile"
        )

    if (plan.placement, plan.replicas) != (shape.placement, shape.replicas):
        raise InputError(
            f"a plan of placement {shape.placement} with replicas {shape.replicas}, as in the schedule",
            f"placement {plan.placement} with replicas {plan.replicas}",
            "build the schedule from this plan",
        )
    unknown = [device for slot in plan.slots for device in slot if not 0 <= device < len(cluster.devices)]
    if unknown:
        raise InputError(f"devices 0 to {len(cluster.devices) - 1} of the cluster", unknown, "correct the plan")

    firsts = (0, *plan.cuts)

    def total(name: str) -> FloatArray:
        sums: FloatArray = np.add.reduceat(profile.column(name), firsts)
        return sums

    crossing = profile.crossing(plan.cuts)
    missing = sorted(set(crossing) - set(shape.edges))
    if missing:
        raise InputError(
            "a schedule whose edges carry all that the profile sends between stages",
            f"no edge for {missing}",
            f"build it with edges={sorted(set(crossing) | set(shape.edges))}",
        )
    sizes = np.array([crossing.get(edge, 0.0) for edge in shape.edges])
    incoming = np.array([sum(size for (_, b), size in crossing.items() if b == s) for s in range(shape.stages)])
    devices = [slot[0] for slot in plan.slots]
    parameters, overhead = total("parameter_bytes"), profile.per_stage
    kept = total("kept_bytes") + profile.leaving(plan.cuts)
    recompute = np.array([stage.recompute for stage in plan.stages])
    slower = 1.0 + (profile.newest if shape.law is Law.NEWEST else 0.0)
    slowdown = np.array([slower / min(cluster.devices[d].speed for d in slot) for slot in plan.slots])
    return Costs(
        forward=total("forward") + overhead.forward,
        input_grad=total("input_grad") + overhead.backward,
        weight_grad=total("weight_grad"),
        update=total("update") + overhead.update,
        reduce=np.array([_reduce_seconds(shape, s, parameters[s], devices, cluster) for s in range(shape.stages)]),
        recompute=recompute,
        slowdown=slowdown,
        links=cluster_links(shape, sizes, devices, cluster),
        footprint=Footprint(
            kept,
            total("kept_until_weight_bytes"),
            incoming,
            parameters,
            parameters,
            total("optimizer_bytes"),
            total("buffer_bytes"),
        ),
        host_copy=_host_copy(shape, plan, cluster, np.where(recompute, incoming, kept), slowdown),
        full_backward=total("backward") + overhead.backward
        if any(layer.full_backward for layer in profile.layers)
        else None,
    )


def _host_copy(
    shape: Shape, plan: Plan, cluster: Cluster, sizes: FloatArray, slowdown: FloatArray
) -> FloatArray | None:
    """Return the seconds of each stage's copy, one way, divided by the slot's slowdown, which the simulator applies."""
    seconds = np.zeros(shape.stages)
    for s in (s for s, stage in enumerate(plan.stages) if stage.offload):
        for slot in (shape.slot(s, j) for j in range(int(shape.stage_replicas[s]))):
            slowest = min((cluster.devices[d] for d in plan.slots[slot]), key=lambda device: device.host_bandwidth)
            if not slowest.host_bandwidth:
                raise InputError(
                    f"a host_bandwidth of device kind {slowest.kind!r}, on which stage {s} offloads its activations",
                    "none",
                    "give it in the cluster, or plan without offload",
                )
            seconds[s] = max(seconds[s], sizes[s] / slowest.host_bandwidth / slowdown[slot])
    return seconds if seconds.any() else None


def _reduce_seconds(shape: Shape, stage: int, size: float, devices: Sequence[int], cluster: Cluster) -> float:
    members = [devices[shape.slot(stage, j)] for j in range(int(shape.stage_replicas[stage]))]
    if len(members) < 2:
        return 0.0
    level = cluster.levels[cluster.meeting_level(min(members), max(members))]
    return ring_seconds(len(members), size, level.reduce_rate(len(members)), level.reduce_wait)
