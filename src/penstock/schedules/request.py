"""The request for a schedule that a builder gets, and the shapes that builders share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.action import Action
from penstock.core.arguments import named_fields
from penstock.core.memory_limit import require_memory
from penstock.core.schedule import Schedule, ScheduleRows
from penstock.core.shape import MOST, Law, Shape, Sharing
from penstock.core.validation import whole
from penstock.errors import InputError
from penstock.schedules.program import Program, flush

MOST_RANKS = 2**14  # more than anyone has: a mistyped number is refused at once
MOST_STAGES = 2**16  # of all ranks together
MOST_SLOTS = 2**20


@named_fields
@dataclass(frozen=True)
class ScheduleRequest:
    """One request for a schedule. `stages` counts pipeline ranks; each holds `chunks` parts of the model."""

    name: str
    stages: int
    microbatches: int
    batches: int = 1
    chunks: int = 1
    replicas: tuple[int, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    any_chunks: bool = False  # the caller gave no number of chunks: a method may choose one

    def __post_init__(self) -> None:
        for what in ("stages", "microbatches", "batches", "chunks"):
            whole(what, getattr(self, what))
        whole("stages x chunks", self.stages * self.chunks, most=MOST_STAGES)
        whole(
            "stages x chunks x micro-batches", self.stages * self.chunks * self.microbatches * self.batches, most=MOST
        )
        for count in self.replicas:
            whole("replicas", count, most=MOST_SLOTS)
        whole("slots", sum(self.replicas, start=1), most=MOST_SLOTS)
        require_memory(2 * self.stages * self.chunks * self.microbatches * self.batches)

    def shape(self, placement: tuple[int, ...], law: Law = Law.SYNC, sharing: Sharing = Sharing.SPLIT) -> Shape:
        return Shape(self.name, law, placement, self.microbatches, self.batches, self.replicas, sharing, self.edges)

    def schedule(self, ranks: Sequence[Sequence[str | Action]], placement: tuple[int, ...] | None = None) -> Schedule:
        """Return a synchronous schedule: each rank's compute actions in one mini-batch, in order, as words ("0F3") or
        actions. They are repeated for all mini-batches, on each replica. `placement` is the rank of every stage."""
        shape = self.straight() if placement is None else self.shape(placement)
        if len(ranks) != shape.ranks:
            raise InputError(f"one list of actions for each of {shape.ranks} ranks", len(ranks), "give one a rank")
        actions = [[Action.parse(one) if isinstance(one, str) else one for one in rank] for rank in ranks]
        rows = [ScheduleRows.of_actions(rank) for rank in actions]
        return flush(shape, [Program(part.op, part.stage, part.microbatch) for part in rows])

    def straight(self, law: Law = Law.SYNC, sharing: Sharing = Sharing.SPLIT) -> Shape:
        """One stage a rank, in order."""
        return self.shape(tuple(range(self.stages)), law, sharing)

    def looped(self) -> Shape:
        """Stage s on rank s mod p: every pass over the ranks is one chunk."""
        return self.shape(tuple(range(self.stages)) * self.chunks)

    def folded(self) -> Shape:
        """Two chunks a rank, placed as a V: down the ranks, and up again."""
        return self.shape((*range(self.stages), *reversed(range(self.stages))))
