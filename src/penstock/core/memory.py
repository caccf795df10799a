"""What a slot holds in memory, by kind, as its list of actions goes by.

A slot does one thing at a time, so the order of its list alone decides its memory; times only place it on the clock.

A stage that offloads has a micro-batch's activations on the device while its own F runs, while its own B or I runs,
and of those that I leaves, until W has run. On top comes room for one micro-batch's copy that is on its way out or
back, from the stage's first forward to its last backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from penstock.core.action import Op
from penstock.core.cost import Costs, shares
from penstock.core.links import FloatArray
from penstock.core.schedule import BoolArray, Schedule
from penstock.core.shape import Law


class Kind(StrEnum):
    WEIGHTS = "weights"
    VERSIONS = "versions"  # older weights that some backward still needs
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    HELD = "held"  # what must stay between input and weight gradient
    RECOMPUTE = "recompute"  # activations made a second time


ACTIVATION_KINDS = (Kind.ACTIVATIONS, Kind.HELD, Kind.RECOMPUTE)
Changes = tuple[FloatArray, FloatArray]  # by row: change when it starts, change when it ends


def activation_changes(schedule: Schedule, costs: Costs) -> dict[Kind, Changes]:
    """What each row does to the activations of its slot."""
    op, stage = schedule.rows.op, schedule.rows.stage
    foot, share = costs.footprint, shares(schedule.shape)
    full, late = foot.activations * share, foot.until_weight * share
    kept = np.where(costs.recompute, foot.inputs * share, full)
    forward, full_backward, weight = (op == Op.F) | (op == Op.FB), op == Op.B, op == Op.W
    split = op == Op.I
    backward = full_backward | split

    def where(mask: BoolArray, per_stage: FloatArray) -> FloatArray:
        change = np.zeros(len(op))
        change[mask] = per_stage[stage[mask]]
        return change

    remade = where(backward, full - kept)
    begun, ended = where(forward, kept), where(backward, -kept)
    if costs.offloads.any():
        away = costs.offloads[stage]
        first, last = _ends(schedule, forward & away, backward & away)
        begun += where(backward & away, kept) + where(first, kept)
        ended -= where(forward & away, kept) + where(last, kept)
    return {
        Kind.ACTIVATIONS: (begun, ended),
        Kind.HELD: (np.zeros(len(op)), where(split, late) + where(weight, -late)),
        Kind.RECOMPUTE: (remade, -remade),
    }


def _ends(schedule: Schedule, forward: BoolArray, backward: BoolArray) -> tuple[BoolArray, BoolArray]:
    """The first of some forwards and the last of some backwards, of every stage on every slot."""
    seat = schedule.slot_of_rows() * schedule.shape.stages + schedule.rows.stage
    first, last = np.zeros(len(seat), dtype=bool), np.zeros(len(seat), dtype=bool)
    forwards, backwards = np.flatnonzero(forward), np.flatnonzero(backward)[::-1]
    first[forwards[np.unique(seat[forwards], return_index=True)[1]]] = True
    last[backwards[np.unique(seat[backwards], return_index=True)[1]]] = True
    return first, last


def version_changes(schedule: Schedule) -> Changes:
    """What each row of a lowered schedule does to the number of weight versions alive: each seat starts with one.

    A version lives until its last use, the newest one in any case. An update whose old version nobody needs any more
    replaces it and changes nothing.
    """
    shape, rows = schedule.shape, schedule.rows
    begins, ends = np.zeros(len(rows)), np.zeros(len(rows))
    if shape.law is Law.SYNC:
        return begins, ends
    seat = shape.seats[rows.stage] + shape.slot_replica[schedule.slot_of_rows()]
    width = int(rows.version.max(initial=0)) + 2
    place = seat.astype(np.int64) * width + rows.version
    uses = np.flatnonzero(rows.op <= Op.FB)
    updates = np.flatnonzero(rows.op == Op.UPDATE)
    last_use = np.full(int(shape.seats[-1]) * width, -1, dtype=np.int64)
    last_use[place[uses]] = uses  # rows ascend, so the last one stays
    outlived = last_use[place[updates] - 1]  # last use of the version that this update follows
    needed = outlived > updates
    begins[updates[needed]] = 1.0
    np.add.at(ends, outlived[needed], -1.0)
    return begins, ends


def gradient_changes(schedule: Schedule, costs: Costs) -> Changes:
    """Gradient buffers live from the first backward of a round to the end of its update."""
    shape, rows = schedule.shape, schedule.rows
    begins, ends = np.zeros(len(rows)), np.zeros(len(rows))
    for at in range(shape.slots):
        start, end = schedule.starts[at : at + 2]
        op, stages = rows.op[start:end], rows.stage[start:end]
        for stage in shape.stages_of(int(shape.slot_rank[at])):
            mine = stages == stage
            updates = start + np.flatnonzero(mine & (op == Op.UPDATE))
            made = start + np.flatnonzero(mine & ((op == Op.B) | (op == Op.W)))
            rounds = np.searchsorted(updates, made)
            first = made[np.unique(rounds, return_index=True)[1]]
            begins[first] = costs.footprint.gradients[stage]
            ends[updates[np.unique(rounds[rounds < len(updates)])]] = -costs.footprint.gradients[stage]
    return begins, ends


def levels(schedule: Schedule, changes: Changes) -> Changes:
    """The level on its slot after each row has started, and after it has ended."""
    level = np.cumsum(np.stack(changes, axis=1).ravel())
    before = np.concatenate(([0.0], level))[2 * schedule.starts[:-1]]
    level -= np.repeat(before, 2 * np.diff(schedule.starts))
    return level[0::2], level[1::2]


def highest(schedule: Schedule, begun: FloatArray, ended: FloatArray) -> FloatArray:
    """The highest level on every slot."""
    top = np.zeros(schedule.shape.slots)
    slot = schedule.slot_of_rows()
    np.maximum.at(top, slot, begun)
    np.maximum.at(top, slot, ended)
    return top


def most_versions(schedule: Schedule) -> FloatArray:
    """Most weight versions alive on every slot of a lowered schedule, on one of its stages."""
    return 1.0 + highest(schedule, *levels(schedule, version_changes(schedule)))


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes on every slot, by kind: `standing` all the time; on top, after each row's start and after its end."""

    standing: dict[Kind, FloatArray]  # by slot
    begun: dict[Kind, FloatArray]  # by row
    ended: dict[Kind, FloatArray]

    @classmethod
    def predicted(cls, schedule: Schedule, costs: Costs) -> Memory:
        shape, foot = schedule.shape, costs.footprint
        births, deaths = version_changes(schedule)
        changes = {
            Kind.VERSIONS: (births * foot.weights[schedule.rows.stage], deaths * foot.weights[schedule.rows.stage]),
            Kind.GRADIENTS: gradient_changes(schedule, costs),
            **activation_changes(schedule, costs),
        }
        by_row = {kind: levels(schedule, change) for kind, change in changes.items()}
        weights, optimizer = np.zeros(shape.ranks), np.zeros(shape.ranks)
        np.add.at(weights, shape.stage_rank, foot.weights + (0.0 if foot.buffers is None else foot.buffers))
        np.add.at(optimizer, shape.stage_rank, foot.optimizer)
        return cls(
            {Kind.WEIGHTS: weights[shape.slot_rank], Kind.OPTIMIZER: optimizer[shape.slot_rank]},
            {kind: begun for kind, (begun, _) in by_row.items()},
            {kind: ended for kind, (_, ended) in by_row.items()},
        )

    def peak(self, schedule: Schedule, kinds: Iterable[Kind] = tuple(Kind)) -> FloatArray:
        """The highest sum of some kinds on every slot."""
        wanted = set(kinds)
        nothing = np.zeros(len(schedule))
        begun = sum((level for kind, level in self.begun.items() if kind in wanted), nothing)
        ended = sum((level for kind, level in self.ended.items() if kind in wanted), nothing)
        always = sum((level for kind, level in self.standing.items() if kind in wanted), np.zeros(schedule.shape.slots))
        return highest(schedule, begun, ended) + always

    def to_json(self) -> dict[str, Any]:
        return {
            part: {kind.value: values.tolist() for kind, values in getattr(self, part).items()}
            for part in ("standing", "begun", "ended")
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Memory:
        def read(part: str) -> dict[Kind, FloatArray]:
            return {Kind(kind): np.array(values) for kind, values in data[part].items()}

        return cls(read("standing"), read("begun"), read("ended"))
