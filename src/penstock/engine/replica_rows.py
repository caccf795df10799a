"""Rows that replicas exchange: each replica of a stage has its part of every micro-batch's rows, and where two stages
have different numbers of replicas, each pair exchanges the rows that both have.

A value without rows goes to each replica of the next stage from the first replica that it has rows in common with, and
its gradient goes back there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.model.passage import Passage
from penstock.model.row_dimensions import RowDimensions
from penstock.model.stage import Job, Share, Values


def part_of(rows: int, replicas: int, replica: int) -> tuple[int, int]:
    """Return the first row of a replica's part of a micro-batch, and the first row behind it."""
    return rows * replica // replicas, rows * (replica + 1) // replicas


@dataclass(frozen=True)
class ReplicaRows:
    """The division of every micro-batch's rows over the replicas of each stage."""

    replicas: Sequence[int]  # of every stage
    dimensions: RowDimensions

    def peers(self, stage: int, replica: int, peer: int) -> range:
        """Return which replicas of another stage have rows in common with a replica of this one."""
        ours, theirs = self.replicas[stage], self.replicas[peer]
        return range(replica * theirs // ours, ((replica + 1) * theirs - 1) // ours + 1)

    def common(self, rows: int, stage: int, replica: int, peer: int, peer_replica: int) -> tuple[int, int]:
        """Return the rows of a micro-batch that two replicas of different stages both have."""
        first, last = part_of(rows, self.replicas[stage], replica)
        other_first, other_last = part_of(rows, self.replicas[peer], peer_replica)
        return max(first, other_first), max(min(last, other_last), first, other_first)

    def unequal(self, stage: int, peer: int) -> bool:
        """Return whether replicas of two stages have unequal rows, and so may call things by other names."""
        return self.replicas[stage] != self.replicas[peer]

    def divide(self, job: Job, values: Values, stage: int, replica: int, peer: int, peer_replica: int) -> Values:
        """Return what one replica sends to another: activations to a later stage, gradients to an earlier one."""
        if not self.unequal(stage, peer):
            return values
        rows = _whole(job)
        first, last = self.common(rows, stage, replica, peer, peer_replica)
        if first == last:
            return {}
        start = part_of(rows, self.replicas[stage], replica)[0]
        if peer > stage:
            gives = self._giver(rows, peer, peer_replica, stage) == replica
        else:
            gives = self._giver(rows, stage, replica, peer) == peer_replica
        part = {}
        for value, tensor in values.items():
            dimension = self.dimensions.of(job.path.row_names.values[value], job.path.describe(value))
            if dimension.dimension is not None:
                part[value] = dimension.part(tensor, first - start, last - start)
            elif gives:
                part[value] = tensor
        return part

    def _giver(self, rows: int, later: int, replica: int, earlier: int) -> int:
        """Return the first replica of an earlier stage that has rows in common with a replica of a later one."""
        for giver in self.peers(later, replica, earlier):
            first, last = self.common(rows, later, replica, earlier, giver)
            if first < last:
                return giver
        return -1

    def passage(self, job: Job, share: Share, peer: int, peer_replica: int) -> Passage:
        """Return what stages tell each other besides tensors, in the sizes of a replica that has others."""
        passage = job.passage
        first, last = part_of(share.whole, self.replicas[peer], peer_replica)
        names, shapes = job.path.row_names.values, {}
        for value, (shape, dtype) in passage.shapes.items():
            if job.path.trace.values[value].free:
                continue  # that every stage makes itself
            dimension = self.dimensions.of(names[value], job.path.describe(value))
            shapes[value] = (dimension.shape(tuple(shape), last - first), dtype)
        return Passage(shapes, passage.plain, passage.grads)

    def join(self, job: Job, parts: list[Values], stage: int, replica: int, peer: int) -> Values:
        """Return one value from the parts that the replicas of another stage have sent, in the order of their rows."""
        if not self.unequal(stage, peer):
            return parts[0]
        joined: Values = {}
        for value in {value: None for part in parts for value in part}:
            dimension = self.dimensions.of(job.path.row_names.values[value], job.path.describe(value))
            pieces = [part.get(value) for part in parts]
            known = [piece for piece in pieces if piece is not None]
            if dimension.dimension is None:
                joined[value] = in_order(known)
                continue
            if len(known) < len(parts):  # no gradient came from some: it is 0 for their rows
                peers = self.peers(stage, replica, peer)
                rows = [self.common(_whole(job), stage, replica, peer, other) for other in peers]
                spans = zip(pieces, rows, strict=True)
                known = [
                    known[0].new_zeros(dimension.shape(tuple(known[0].shape), last - first)) if piece is None else piece
                    for piece, (first, last) in spans
                ]
            joined[value] = torch.cat(known, dimension.dimension) if len(known) > 1 else known[0]
        return joined


def _whole(job: Job) -> int:
    assert job.share is not None
    return job.share.whole


def in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of what replicas have, added in their order; one part is returned as it is."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
