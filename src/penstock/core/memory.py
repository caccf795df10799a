"""Memory of each slot, by kind, after each action of its list.

A slot runs one action at a time, so that its memory depends on the order of its list alone, not on times.

A stage that offloads has a micro-batch's activations on the device while its F, B or I runs, and those that I keeps for
W until W has run. From its first forward to its last backward, it also holds a buffer for the copy of one micro-batch
to or from host memory.
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
from penstock.core.memory_events import EventArray, MemoryEvent, memory_events
from penstock.core.schedule import Schedule
from penstock.core.shape import Shape
from penstock.core.validation import column
from penstock.errors import InputError


class MemoryKind(StrEnum):
    WEIGHTS = "weights"
    VERSIONS = "versions"  # older weights that a backward will use
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    HELD = "held"  # kept from input gradient to weight gradient
    RECOMPUTE = "recompute"  # recomputed activations


ACTIVATION_KINDS = (MemoryKind.ACTIVATIONS, MemoryKind.HELD, MemoryKind.RECOMPUTE)
Changes = tuple[FloatArray, FloatArray]  # by row: change at its start, change at its end


@dataclass(frozen=True, eq=False)
class ActivationTables:
    """Changes of a slot's activations by an action, by (op, stage): at its start and at its end.

    `copy`, by stage, is the copy buffer of a stage that offloads, from its first forward to its last backward.
    """

    kinds: dict[MemoryKind, Changes]
    copy: FloatArray


def activation_tables(costs: Costs, share: FloatArray) -> ActivationTables:
    """Return the changes by each action, where a replica of each stage handles `share` of a micro-batch's rows."""
    foot, offloads = costs.footprint, costs.offloads
    full, late = foot.activations * share, foot.until_weight * share
    kept = np.where(costs.recompute, foot.inputs * share, full)
    begun, ended, recomputed, held = (np.zeros((len(Op), len(full))) for _ in range(4))
    begun[[Op.F, Op.FB]], ended[[Op.B, Op.I]] = kept, -kept
    begun[[Op.B, Op.I]], ended[[Op.F, Op.FB]] = np.where(offloads, kept, 0.0), np.where(offloads, -kept, 0.0)
    recomputed[[Op.B, Op.I]] = full - kept
    held[Op.I], held[Op.W] = late, -late
    kinds = {
        MemoryKind.ACTIVATIONS: (begun, ended),
        MemoryKind.HELD: (np.zeros_like(held), held),
        MemoryKind.RECOMPUTE: (recomputed, -recomputed),
    }
    return ActivationTables(kinds, np.where(offloads, kept, 0.0))


def activation_changes(schedule: Schedule, costs: Costs) -> dict[MemoryKind, Changes]:
    """Return, by row, the changes of its slot's activations, by kind."""
    op, stage = schedule.rows.op, schedule.rows.stage
    tables = activation_tables(costs, shares(schedule.shape))
    changes = {kind: (begun[op, stage], ended[op, stage]) for kind, (begun, ended) in tables.kinds.items()}
    if costs.offloads.any():
        (begun, ended), events = changes[MemoryKind.ACTIVATIONS], memory_events(schedule)
        begun += _at_event(schedule, events, MemoryEvent.FIRST_FORWARD, tables.copy)
        ended -= _at_event(schedule, events, MemoryEvent.LAST_BACKWARD, tables.copy)
    return changes


def _at_event(schedule: Schedule, events: EventArray, event: MemoryEvent, per_stage: FloatArray) -> FloatArray:
    """Return, by row, the number of its stage where the row has the event, else 0."""
    change: FloatArray = np.where(events & event, per_stage[schedule.rows.stage], 0.0)
    return change


def levels(schedule: Schedule, changes: Changes) -> Changes:
    """Return the level on each row's slot after its start, and after its end."""
    level = np.cumsum(np.stack(changes, axis=1).ravel())
    before = np.concatenate(([0.0], level))[2 * schedule.starts[:-1]]
    level -= np.repeat(before, 2 * np.diff(schedule.starts))
    return level[0::2], level[1::2]


def highest(schedule: Schedule, begun: FloatArray, ended: FloatArray) -> FloatArray:
    """Return the highest level of every slot."""
    top = np.zeros(schedule.shape.slots)
    slot = schedule.slot_of_rows()
    np.maximum.at(top, slot, begun)
    np.maximum.at(top, slot, ended)
    return top


def most_versions(schedule: Schedule) -> FloatArray:
    """Return the most weight versions of one stage that every slot of a lowered schedule holds at once."""
    return 1.0 + highest(schedule, *levels(schedule, _version_changes(schedule, np.ones(schedule.shape.stages))))


def _version_changes(schedule: Schedule, weights: FloatArray) -> Changes:
    events = memory_events(schedule)
    kept = _at_event(schedule, events, MemoryEvent.VERSION_KEPT, weights)
    return kept, -_at_event(schedule, events, MemoryEvent.VERSION_FREED, weights)


def standing(shape: Shape, costs: Costs) -> dict[MemoryKind, FloatArray]:
    """Return the bytes of weights and optimizer state of every slot, which it holds at all times."""
    weights, optimizer, foot = np.zeros(shape.ranks), np.zeros(shape.ranks), costs.footprint
    np.add.at(weights, shape.stage_rank, foot.weights + (0.0 if foot.buffers is None else foot.buffers))
    np.add.at(optimizer, shape.stage_rank, foot.optimizer)
    return {MemoryKind.WEIGHTS: weights[shape.slot_rank], MemoryKind.OPTIMIZER: optimizer[shape.slot_rank]}


@dataclass(frozen=True, eq=False)
class MemoryUse:
    """Bytes of every slot, by kind: `standing` at all times, and in addition those after each row's start and end."""

    standing: dict[MemoryKind, FloatArray]  # by slot
    begun: dict[MemoryKind, FloatArray]  # by row
    ended: dict[MemoryKind, FloatArray]

    @classmethod
    def predicted(cls, schedule: Schedule, costs: Costs) -> MemoryUse:
        """Return the memory of a lowered schedule according to its costs."""
        events, foot = memory_events(schedule), costs.footprint
        allocated = _at_event(schedule, events, MemoryEvent.GRADIENT_ALLOCATED, foot.gradients)
        freed = _at_event(schedule, events, MemoryEvent.GRADIENT_FREED, foot.gradients)
        changes = {
            MemoryKind.VERSIONS: _version_changes(schedule, foot.weights),
            MemoryKind.GRADIENTS: (allocated, -freed),
            **activation_changes(schedule, costs),
        }
        by_row = {kind: levels(schedule, change) for kind, change in changes.items()}
        return cls(
            standing(schedule.shape, costs),
            {kind: begun for kind, (begun, _) in by_row.items()},
            {kind: ended for kind, (_, ended) in by_row.items()},
        )

    def peak(self, schedule: Schedule, kinds: Iterable[MemoryKind] = tuple(MemoryKind)) -> FloatArray:
        """Return the highest sum of the given kinds on every slot."""
        kinds = set(kinds)
        zeros = np.zeros(len(schedule))
        begun = sum((level for kind, level in self.begun.items() if kind in kinds), zeros)
        ended = sum((level for kind, level in self.ended.items() if kind in kinds), zeros)
        always = sum((level for kind, level in self.standing.items() if kind in kinds), np.zeros(schedule.shape.slots))
        return highest(schedule, begun, ended) + always

    def to_json(self) -> dict[str, Any]:
        return {
            part: {kind.value: values.tolist() for kind, values in getattr(self, part).items()}
            for part in ("standing", "begun", "ended")
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], slots: int, rows: int) -> MemoryUse:
        def read(part: str, length: int) -> dict[MemoryKind, FloatArray]:
            return {
                MemoryKind(kind): column(f"{part} of {kind}", values, length) for kind, values in data[part].items()
            }

        memory = cls(read("standing", slots), read("begun", rows), read("ended", rows))
        if set(memory.begun) != set(memory.ended):
            raise InputError("the same kinds of memory in begun and ended", "different ones", "write it with to_json")
        return memory
