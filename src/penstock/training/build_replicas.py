"""Build what stages with several replicas need: the division of rows, the sums of gradients, and local lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.comm.collectives.open import open_reducer
from penstock.comm.transport.interface import LaneName, Lanes, lane_names
from penstock.comm.transport.local import LocalLane
from penstock.comm.world.world import World
from penstock.core.shape import Shape
from penstock.engine.replica_rows import ReplicaRows
from penstock.errors import InputError, SplitError
from penstock.model.batchnorm import is_deferred
from penstock.model.row_dimensions import RowDimensions, row_dimensions
from penstock.model.split import Split
from penstock.model.stage import Stage
from penstock.training.processes import Ranks
from penstock.training.replicas import ReplicaSums
from penstock.training.sharded_state import Shard, ShardedState


def divided_rows(
    ranks: Ranks, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, weightless: bool
) -> ReplicaRows:
    """Return how replicas divide the rows of micro-batches. Where counts differ between stages that exchange values,
    rows must be found in all of these."""
    counts = ranks.replicas
    if all(counts[a] == counts[b] for a, b in split.edges):
        return ReplicaRows(counts, RowDimensions())
    if weightless:
        raise InputError(
            "a model with weights where stages have unequal numbers of replicas: the example is run to find the rows",
            "one without",
            "give all stages the same number of replicas, or load the weights first",
        )
    return ReplicaRows(counts, row_dimensions(split, args, kwargs, device))


def open_sums(
    ranks: Ranks,
    stages: Sequence[Stage],
    device: torch.device,
    tied: set[nn.Parameter],
    owned: dict[int, dict[str, nn.Parameter]],
    shard: str | None,
) -> ReplicaSums:
    """Return what adds gradients over replicas, and divides their state. The stages of one rank have one way to their
    other replicas."""
    by_place = {(stage.index, stage.replica): stage for stage in stages}
    world = ranks.world
    if not isinstance(world, World):
        return ReplicaSums(by_place, ranks.replicas, tied)
    group = tuple(sorted(ranks.members[ranks.here[0]]))
    if len(group) == 1:
        return ReplicaSums(by_place, ranks.replicas, tied)
    reducer = open_reducer(world, group, device)
    sharded = None if shard is None else ShardedState(Shard(shard), reducer, group.index(world.rank), owned)
    return ReplicaSums(by_place, ranks.replicas, tied, dict.fromkeys(ranks.here, reducer), sharded)


class LocalLanes(Lanes):
    """Lanes between slots of one process."""

    def close(self) -> None:
        """Nothing is held here that others wait for."""


def local_lanes(shape: Shape) -> LocalLanes:
    """Return both ends of all lanes between the slots of a shape, which are all in this process."""
    first = [shape.slot(stage) for stage in range(shape.stages)]
    names: list[LaneName] = lane_names(first, shape.edges, [], shape.stage_replicas.tolist(), shape.turns)
    ends = {name: LocalLane(name) for name in names}
    return LocalLanes(dict(ends), dict(ends))


def require_lanes(shape: Shape, opened: Shape, rows: ReplicaRows | None) -> None:
    """Refuse a schedule whose replicas share the work in a way that this pipeline was not made for."""
    pairs = [(int(shape.stage_replicas[a]), int(shape.stage_replicas[b])) for a, b in shape.edges]
    further = shape.turns and not opened.turns and any(min(pair) > 1 for pair in pairs)
    undivided = not shape.turns and rows is None
    if max(shape.replicas) > 1 and (further or undivided):
        ways = {True: "take mini-batches in turns", False: "split micro-batches"}
        raise InputError(
            f"a schedule whose replicas {ways[opened.turns]}, as this pipeline was made for",
            f"{shape.name}, whose replicas {ways[shape.turns]}",
            "make a Pipeline of its own for it",
        )


def require_untied(ties: Mapping[str, Sequence[int]], shape: Shape) -> None:
    """Refuse tied weights of stages with replicas that take turns: their versions would come at different times."""
    for name, users in ties.items() if shape.turns else ():
        if max(int(shape.stage_replicas[stage]) for stage in users) > 1:
            raise InputError(
                f"weights of stages with replicas that one stage uses alone under {shape.name}",
                f"{name}, which stages {', '.join(map(str, users))} share",
                "give those stages one replica, or use 2bw or a synchronous schedule",
            )


def require_rows(shape: Shape, rows: int) -> None:
    """Refuse a batch with fewer rows than a stage has replicas: some would have none."""
    most = max(shape.replicas)
    if rows < most:
        raise InputError(
            f"a batch of at least {most} rows, one for each replica", rows, "give larger batches, or use fewer replicas"
        )


def require_dense_gradients(ranks: Ranks, split: Split) -> None:
    """Refuse embeddings with sparse gradients in a stage with replicas, whose gradients are added to each other."""
    added = {p: stage for stage in range(split.pieces) if ranks.replicas[stage] > 1 for p in split.used(stage)}
    for name, module in split.model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or not module.sparse:
            continue
        stage = next((stage for parameter, stage in added.items() if parameter is module.weight), None)
        if stage is not None:
            raise InputError(
                "dense gradients in a stage with replicas, which are added to each other",
                f"sparse ones of {f'{name}.weight'.lstrip('.')!r} in stage {stage}",
                "make the embedding with sparse=False, or give its stage one replica",
            )


def require_steady_buffers(ranks: Ranks, split: Split) -> None:
    """Refuse a buffer that the forward changes on a stage with replicas: each would have one of its own. The statistics
    of batch norms are joined."""
    norms = [name for name, module in split.model.named_modules() if is_deferred(module)]
    joined = {
        f"{name}.{buffer}".lstrip(".")
        for name in norms
        for buffer, _ in split.model.get_submodule(name).named_buffers()
    }
    for at, event in enumerate(split.first.trace.events):
        stage = split.first.stage_of(at)
        changed = sorted(set(event.buffers) - joined)
        if changed and ranks.replicas[stage] > 1:
            raise SplitError(
                "buffers that the forward leaves as they are in a stage with replicas, or a batch norm's statistics",
                f"{changed[0]!r}, which the forward changes",
                "give its stage one replica",
            )
