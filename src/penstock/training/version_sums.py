"""The sum over a stage's replicas that makes a version of its weights, in training without a flush.

At the REDUCE row of a version each replica gives its gradients and what else it knows of the mini-batches in it; at the
UPDATE row all replicas have the sum, added in the order of the replicas, and what every one of them knows. In one
process an UPDATE waits until all replicas have come to their REDUCE.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from penstock.comm.collectives.interface import Pending, Reducer
from penstock.engine.replica_rows import in_order
from penstock.model.stage import Stage
from penstock.training.finite_gradients import Gradients
from penstock.training.replicas import counts_of, filled, trained

Facts = dict[str, Any]  # plain values
Place = tuple[int, int]  # a stage and a version


@dataclass(frozen=True)
class _Given:
    """The tensors that a replica adds to the others', and its facts."""

    tensors: list[Tensor]
    facts: bytes


@dataclass
class VersionSums:
    """`counts`: the replicas of every stage; `reducers`: where the others are in other processes."""

    counts: Sequence[int]
    reducers: Mapping[int, Reducer] = field(default_factory=dict)
    given: dict[Place, dict[int, _Given]] = field(default_factory=dict)  # by replica, those of this process
    pending: dict[Place, Pending] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)  # the newest version of each stage whose sum was taken
    ended: int = 0  # when the last sum that was taken was there, in nanoseconds

    def start(self, stage: Stage, version: int, gradients: Gradients, facts: Facts) -> None:
        """Begin to add the gradients of a stage for a version."""
        place, words = (stage.index, version), json.dumps(facts).encode()
        tensors = [*filled(stage, gradients), counts_of(stage, gradients)]
        reducer = self.reducers.get(stage.index)
        self.given.setdefault(place, {})[stage.replica] = _Given(tensors, words)
        if reducer is not None:
            self.pending[place] = reducer.start([*tensors, self._length(stage, words)])

    def ready(self, stage: Stage, version: int) -> bool:
        """Return whether all replicas of this process have given theirs."""
        place = stage.index, version
        return self.was_taken(stage, version) or place in self.pending or len(self.given[place]) == self._count(stage)

    def was_taken(self, stage: Stage, version: int) -> bool:
        """Return whether another replica of this process has taken the sum."""
        return version <= self.taken.get(stage.index, 0)

    def take(self, stage: Stage, version: int) -> tuple[Gradients, list[Facts]]:
        """Return the sum, and the facts of every replica in their order."""
        place = stage.index, version
        given = self.given.pop(place)
        if place in self.pending:
            pending = self.pending.pop(place)
            *totals, there, lengths = pending.wait()
            self.ended = pending.ended
            every = self._everyone_s(stage, given[stage.replica].facts, lengths.tolist())
        else:
            parts = [given[replica] for replica in sorted(given)]
            *totals, there = (in_order(column) for column in zip(*(part.tensors for part in parts), strict=True))
            every = [part.facts for part in parts]
            self.ended = perf_counter_ns()
        self.taken[stage.index] = version
        sums = zip(trained(stage), totals, there.tolist(), strict=True)
        return {parameter: total for parameter, total, any_made in sums if any_made}, [*map(json.loads, every)]

    def forget(self) -> None:
        """Forget what an interrupted run has left behind; versions are counted from 1 again."""
        self.given.clear()
        self.pending.clear()
        self.taken.clear()

    def _count(self, stage: Stage) -> int:
        return self.counts[stage.index]

    def _length(self, stage: Stage, words: bytes) -> Tensor:
        """Return the length of this replica's facts in its own place, and 0 in those of others."""
        lengths = torch.zeros(self._count(stage), dtype=torch.int64)
        lengths[stage.replica] = len(words)
        return lengths.to(stage.settings.device)

    def _everyone_s(self, stage: Stage, words: bytes, lengths: list[int]) -> list[bytes]:
        """Return the facts of every replica: bytes of which each replica gives its own, added to zeros."""
        begin = sum(lengths[: stage.replica])
        data = torch.zeros(sum(lengths), dtype=torch.uint8)
        data[begin : begin + len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        (joined,) = self.reducers[stage.index].start([data.to(stage.settings.device)]).wait()
        every = bytes(joined.cpu().numpy())
        ends = [sum(lengths[: at + 1]) for at in range(len(lengths))]
        return [every[end - length : end] for end, length in zip(ends, lengths, strict=True)]
