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
from penstock.core.given import column
from penstock.core.links import FloatArray
from penstock.core.marks import Mark, MarkArray, marks
from penstock.core.schedule import Schedule
from penstock.core.shape import Shape
from penstock.errors import InputError


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


@dataclass(frozen=True, eq=False)
class Tables:
    """What an action does to the activations of its slot, by (op, stage): when it starts, and when it ends.

    `copy`, by stage, is room for a copy, from the first forward to the last backward of a stage that offloads.
    """

    kinds: dict[Kind, Changes]
    copy: FloatArray


def activation_tables(costs: Costs, share: FloatArray) -> Tables:
    """`share`: the fraction of a micro-batch's rows that a replica of each stage handles."""
    foot, away = costs.footprint, costs.offloads
    full, late = foot.activations * share, foot.until_weight * share
    kept = np.where(costs.recompute, foot.inputs * share, full)
    begun, ended, remade, held = (np.zeros((len(Op), len(full))) for _ in range(4))
    begun[[Op.F, Op.FB]], ended[[Op.B, Op.I]] = kept, -kept
    begun[[Op.B, Op.I]], ended[[Op.F, Op.FB]] = np.where(away, kept, 0.0), np.where(away, -kept, 0.0)
    remade[[Op.B, Op.I]] = full - kept
    held[Op.I], held[Op.W] = late, -late
    kinds = {
        Kind.ACTIVATIONS: (begun, ended),
        Kind.HELD: (np.zeros_like(held), held),
        Kind.RECOMPUTE: (remade, -remade),
    }
    return Tables(kinds, np.where(away, kept, 0.0))


def activation_changes(schedule: Schedule, costs: Costs) -> dict[Kind, Changes]:
    """What each row does to the activations of its slot."""
    op, stage = schedule.rows.op, schedule.rows.stage
    tables = activation_tables(costs, shares(schedule.shape))
    changes = {kind: (begun[op, stage], ended[op, stage]) for kind, (begun, ended) in tables.kinds.items()}
    if costs.offloads.any():
        (begun, ended), found = changes[Kind.ACTIVATIONS], marks(schedule)
        begun += marked(schedule, found, Mark.FIRST, tables.copy)
        ended -= marked(schedule, found, Mark.LAST, tables.copy)
    return changes


def marked(schedule: Schedule, found: MarkArray, mark: Mark, per_stage: FloatArray) -> FloatArray:
    """By row: what its stage has, where it is so marked."""
    change: FloatArray = np.where(found & mark, per_stage[schedule.rows.stage], 0.0)
    return change


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
    return 1.0 + highest(schedule, *levels(schedule, _version_changes(schedule, np.ones(schedule.shape.stages))))


def _version_changes(schedule: Schedule, weights: FloatArray) -> Changes:
    found = marks(schedule)
    return marked(schedule, found, Mark.BORN, weights), -marked(schedule, found, Mark.DEAD, weights)


def standing(shape: Shape, costs: Costs) -> dict[Kind, FloatArray]:
    """What every slot holds all the time."""
    weights, optimizer, foot = np.zeros(shape.ranks), np.zeros(shape.ranks), costs.footprint
    np.add.at(weights, shape.stage_rank, foot.weights + (0.0 if foot.buffers is None else foot.buffers))
    np.add.at(optimizer, shape.stage_rank, foot.optimizer)
    return {Kind.WEIGHTS: weights[shape.slot_rank], Kind.OPTIMIZER: optimizer[shape.slot_rank]}


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes on every slot, by kind: `standing` all the time; on top, after each row's start and after its end."""

    standing: dict[Kind, FloatArray]  # by slot
    begun: dict[Kind, FloatArray]  # by row
    ended: dict[Kind, FloatArray]

    @classmethod
    def predicted(cls, schedule: Schedule, costs: Costs) -> Memory:
        found, foot = marks(schedule), costs.footprint
        made, freed = (marked(schedule, found, mark, foot.gradients) for mark in (Mark.MADE, Mark.FREED))
        changes = {
            Kind.VERSIONS: _version_changes(schedule, foot.weights),
            Kind.GRADIENTS: (made, -freed),
            **activation_changes(schedule, costs),
        }
        by_row = {kind: levels(schedule, change) for kind, change in changes.items()}
        return cls(
            standing(schedule.shape, costs),
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
    def from_json(cls, data: dict[str, Any], slots: int, rows: int) -> Memory:
        def read(part: str, length: int) -> dict[Kind, FloatArray]:
            return {Kind(kind): column(f"{part} of {kind}", values, length) for kind, values in data[part].items()}

        memory = cls(read("standing", slots), read("begun", rows), read("ended", rows))
        if set(memory.begun) != set(memory.ended):
            raise InputError("the same kinds of memory in begun and ended", "others", "write it with to_json")
        return memory
