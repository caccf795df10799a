"""The shape of a schedule: its stages, ranks, replicas, micro-batches, and the law of its weight versions.

A *stage* is one part of the model, numbered in model order. A *rank* is one position of the pipeline and has one or
more stages (its chunks). A *slot* is one replica of a rank; slots are numbered rank by rank, replica by replica.
Micro-batches are numbered across all mini-batches: micro-batch k belongs to mini-batch k // microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.validation import from_json_of, shown, text, whole
from penstock.errors import InputError

IntArray = npt.NDArray[np.int32]
MOST = 2**31 - 1  # largest number in a column of a schedule


class Law(StrEnum):
    """Rule for the weight version that an action names. `check` enforces it."""

    SYNC = "sync"  # mini-batch b uses version b on all stages; its update creates b + 1
    STASH = "stash"  # a forward uses the newest version, its backward the same one
    VERTICAL = "vertical"  # every stage uses the version that the first stage used
    NEWEST = "newest"  # forward and backward each use the newest version
    TWO_BW = "2bw"  # mini-batch b uses version max(b - 1, 0): a delay of exactly one, two versions in memory


class Sharing(StrEnum):
    """Division of the work among the replicas of a rank."""

    SPLIT = "split"  # the rows of each micro-batch are split over the replicas
    TURNS = "turns"  # round robin: replica b mod r runs mini-batch b


@dataclass(frozen=True)
class Shape:
    """Frame of a schedule. `placement[s]` is the rank of stage s; `edges` are pairs of stages that exchange data."""

    name: str
    law: Law
    placement: tuple[int, ...]
    microbatches: int
    batches: int = 1
    replicas: tuple[int, ...] = ()
    sharing: Sharing = Sharing.SPLIT
    edges: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "law", Law(self.law))
        object.__setattr__(self, "sharing", Sharing(self.sharing))
        text("the name of a schedule", self.name, "give it a name")
        object.__setattr__(self, "placement", _whole("the rank of a stage", self.placement))
        self._require_counts()
        object.__setattr__(self, "replicas", _whole("replicas", self.replicas) or (1,) * self.ranks)
        chain = tuple((stage, stage + 1) for stage in range(self.stages - 1))
        edges = tuple((whole("a stage", a, 0, MOST), whole("a stage", b, 0, MOST)) for a, b in self.edges)
        object.__setattr__(self, "edges", edges or chain)
        self._require_consistent()

    def _require_counts(self) -> None:
        for what in ("microbatches", "batches"):
            object.__setattr__(self, what, whole(what, getattr(self, what)))
        if self.microbatches * self.batches > MOST:
            raise InputError(
                f"at most {MOST} micro-batches in all mini-batches",
                shown(self.microbatches * self.batches),
                "ask for fewer",
            )
        used = set(self.placement)
        if not used or min(used) < 0 or max(used) + 1 != len(used):
            raise InputError(
                "a placement that uses every rank from 0 up", list(self.placement), "give each rank at least one stage"
            )

    def _require_consistent(self) -> None:
        if len(self.replicas) != self.ranks or min(self.replicas) < 1:
            raise InputError(
                f"a positive replica count for each of {self.ranks} ranks",
                list(self.replicas),
                "give one number a rank, separated by commas",
            )
        for edge in self.edges:
            if not 0 <= edge[0] < edge[1] < self.stages:
                raise InputError(
                    f"edges from an earlier to a later of {self.stages} stages", edge, "order the stages by the model"
                )
        if len(set(self.edges)) < len(self.edges):
            raise InputError("each edge once", list(self.edges), "drop the second of two equal ones")
        if self.sharing is Sharing.TURNS and self.law in (Law.SYNC, Law.TWO_BW):
            raise InputError(
                f"replicas that split each micro-batch under the law {self.law.value!r}",
                "replicas that take turns",
                "use sharing='split'",
            )

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def ranks(self) -> int:
        return max(self.placement) + 1

    @cached_property
    def slots(self) -> int:
        return sum(self.replicas)

    @property
    def total(self) -> int:
        """Number of micro-batches of all mini-batches together."""
        return self.microbatches * self.batches

    @cached_property
    def turns(self) -> bool:
        return self.sharing is Sharing.TURNS

    @cached_property
    def first_slot(self) -> IntArray:
        """First slot of each rank, followed by the number of slots."""
        return np.concatenate(([0], np.cumsum(self.replicas))).astype(np.int32)

    @cached_property
    def slot_rank(self) -> IntArray:
        return np.repeat(np.arange(self.ranks, dtype=np.int32), self.replicas)

    @cached_property
    def slot_replica(self) -> IntArray:
        return (np.arange(self.slots) - self.first_slot[self.slot_rank]).astype(np.int32)

    @cached_property
    def stage_rank(self) -> IntArray:
        return np.array(self.placement, dtype=np.int32)

    @cached_property
    def stage_replicas(self) -> IntArray:
        return np.array(self.replicas, dtype=np.int32)[self.stage_rank]

    @cached_property
    def replica_start(self) -> IntArray:
        """Offset of each stage in tables with an entry per replica of a stage: replica_start[stage] + replica.

        The last entry is the size of such a table.
        """
        return np.concatenate(([0], np.cumsum(self.stage_replicas))).astype(np.int32)

    @cached_property
    def replica_places(self) -> tuple[IntArray, IntArray]:
        """Stage and slot of every entry of a table with an entry per replica of a stage."""
        stage = np.repeat(np.arange(self.stages, dtype=np.int32), self.stage_replicas)
        replica = np.arange(len(stage), dtype=np.int32) - self.replica_start[stage]
        return stage, self.first_slot[self.stage_rank[stage]] + replica

    @cached_property
    def chunks(self) -> int:
        """Largest number of stages of a rank."""
        return int(np.bincount(self.stage_rank).max())

    def slot(self, stage: int, replica: int = 0) -> int:
        """Return the slot of a replica of a stage."""
        return int(self.first_slot[self.placement[stage]]) + replica

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank in model order."""
        return tuple(stage for stage, at in enumerate(self.placement) if at == rank)

    @cached_property
    def stage_updates(self) -> npt.NDArray[np.int64]:
        """Number of updates of each stage in the whole schedule."""
        replicas = self.stage_replicas if self.turns else np.ones_like(self.stage_replicas)
        return -(-self.batches // replicas.astype(np.int64))

    @cached_property
    def rank_chunks(self) -> IntArray:
        """Number of stages on each stage's rank."""
        return np.bincount(self.stage_rank)[self.stage_rank].astype(np.int32)

    @cached_property
    def neighbours(self) -> Neighbours:
        return Neighbours.of(self)

    @cached_property
    def lanes(self) -> LaneTable:
        return LaneTable.of(self)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "law": self.law.value,
            "placement": list(self.placement),
            "microbatches": self.microbatches,
            "batches": self.batches,
            "replicas": list(self.replicas),
            "sharing": self.sharing.value,
            "edges": [list(edge) for edge in self.edges],
        }

    @classmethod
    @from_json_of("schedule")
    def from_json(cls, data: dict[str, Any]) -> Shape:
        return cls(
            name=data["name"],
            law=Law(data["law"]),
            placement=tuple(data["placement"]),
            microbatches=data["microbatches"],
            batches=data["batches"],
            replicas=tuple(data["replicas"]),
            sharing=Sharing(data["sharing"]),
            edges=tuple((a, b) for a, b in data["edges"]),
        )


def _whole(what: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return whole numbers of 0 or more as Python ints."""
    return tuple(whole(what, value, 0, MOST) for value in values)


@dataclass(frozen=True)
class Neighbours:
    """The edges by stage, in compressed sparse rows: successors of s are `after[after_at[s]:after_at[s + 1]]`.

    A *lane* is one (edge, sending replica, receiving replica): lane = edge_lane[e] + i * replicas of the receiver + j.
    """

    after_at: IntArray
    after: IntArray
    after_lane: IntArray  # first lane of the edge, for each entry of `after`
    before_at: IntArray
    before: IntArray
    before_lane: IntArray
    edge_lane: IntArray  # first lane of each edge of the shape, followed by the number of lanes

    @classmethod
    def of(cls, shape: Shape) -> Neighbours:
        edges = np.array(shape.edges, dtype=np.int32).reshape(-1, 2)
        width = shape.stage_replicas[edges[:, 0]] * shape.stage_replicas[edges[:, 1]]
        lanes = np.concatenate(([0], np.cumsum(width))).astype(np.int32)
        forward = np.argsort(edges[:, 0], kind="stable")
        backward = np.argsort(edges[:, 1], kind="stable")
        bounds = np.arange(shape.stages + 1)
        return cls(
            after_at=np.searchsorted(edges[forward, 0], bounds).astype(np.int32),
            after=edges[forward, 1].astype(np.int32),
            after_lane=lanes[:-1][forward].astype(np.int32),
            before_at=np.searchsorted(edges[backward, 1], bounds).astype(np.int32),
            before=edges[backward, 0].astype(np.int32),
            before_lane=lanes[:-1][backward].astype(np.int32),
            edge_lane=lanes,
        )


@dataclass(frozen=True)
class LaneTable:
    """The lanes between different ranks, with one entry each, in the order of the edges."""

    number: IntArray
    source: IntArray  # the slot that sends the activation
    target: IntArray  # the slot that receives it
    edge: IntArray
    share: npt.NDArray[np.float64]  # of a micro-batch's rows

    @classmethod
    def of(cls, shape: Shape) -> LaneTable:
        entries = []
        for edge, (a, b) in enumerate(shape.edges):
            if shape.placement[a] == shape.placement[b]:
                continue
            ours, theirs = int(shape.stage_replicas[a]), int(shape.stage_replicas[b])
            pairs = common_rows(ours, theirs)
            if shape.turns:
                pairs = [(i, j, 1.0) for i in range(ours) for j in range(theirs)]
            first = int(shape.neighbours.edge_lane[edge])
            entries += [
                (first + i * theirs + j, shape.slot(a, i), shape.slot(b, j), edge, rows) for i, j, rows in pairs
            ]
        number, source, target, edge_of = np.array([e[:4] for e in entries], dtype=np.int32).reshape(-1, 4).T.copy()
        return cls(number, source, target, edge_of, np.array([e[4] for e in entries], dtype=np.float64))

    @cached_property
    def pairs(self) -> IntArray:
        """Numbers of the (sending slot, receiving slot) pairs of each lane, each way: an array (2, lanes)."""
        numbers: dict[tuple[int, int], int] = {}
        ends = zip(self.source.tolist(), self.target.tolist(), strict=True)
        pairs = [[numbers.setdefault(way, len(numbers)) for way in ((a, b), (b, a))] for a, b in ends]
        return np.array(pairs, dtype=np.int32).reshape(-1, 2).T


@lru_cache(maxsize=4096)
def common_rows(senders: int, receivers: int) -> list[tuple[int, int, float]]:
    """Return (sender, receiver, share of the rows) of replicas with common rows, if each side splits them equally."""
    pairs, i, j = [], 0, 0
    while i < senders and j < receivers:
        first, last = max(i * receivers, j * senders), min((i + 1) * receivers, (j + 1) * senders)
        pairs.append((i, j, (last - first) / (senders * receivers)))
        i, j = i + (last == (i + 1) * receivers), j + (last == (j + 1) * senders)
    return pairs
