"""Build the parts of a pipeline from the user's options: split, proven schedule, stages, engine, optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from penstock.comm.transport.interface import Lanes, lane_names
from penstock.comm.transport.open import open_lanes
from penstock.comm.world.world import Alone
from penstock.core.loop import Loop
from penstock.engine.observer import Observers
from penstock.engine.replica_rows import ReplicaRows
from penstock.engine.weights.ties import TiedWeights, tie_groups
from penstock.errors import InputError, SplitError
from penstock.model.batch import as_call, piece, require_device
from penstock.model.batchnorm import DeferredNorms
from penstock.model.buffers import Buffers
from penstock.model.chain import Chain
from penstock.model.layers import layers_of
from penstock.model.materialise import fill_buffers, is_weightless, materialise
from penstock.model.offload import Offload, Swap
from penstock.model.split import Split
from penstock.model.stage import Recompute, Settings, Stage
from penstock.training.agreed_split import agreed_split
from penstock.training.batches import Feed, taken_by
from penstock.training.build_engine import Chosen, Engine, EngineContext, build_engine, choose, describe, require_sound
from penstock.training.build_replicas import (
    divided_rows,
    open_sums,
    require_dense_gradients,
    require_steady_buffers,
    require_untied,
)
from penstock.training.flush_updates import FlushUpdates
from penstock.training.model_state import guard, release
from penstock.training.option_checks import autocast_of, home_of, read_recompute
from penstock.training.options import PipelineOptions
from penstock.training.plan_options import Planned
from penstock.training.processes import Ranks, join_ranks, require_agreement, require_same_model, same_weights
from penstock.training.schedule_choice import ScheduleChoice
from penstock.training.sharded_state import require_elementwise
from penstock.training.split_check import compare_with_whole
from penstock.training.stage_optimizers import Optimizers


@dataclass
class Assembled:
    """The parts of one process's share in a pipeline."""

    split: Split
    context: EngineContext
    engine: Engine
    norms: DeferredNorms
    buffers: Buffers
    feed: Feed


def assemble(options: PipelineOptions, choice: ScheduleChoice) -> Assembled:
    """Build everything; whatever is refused is refused before any weight has moved."""
    model, cuts, stages = _as_model(options)
    chosen = choose(choice if stages is None else replace(choice, stages=stages), options, cuts)
    shape = chosen.built.shape
    ranks = join_ranks(shape, options.timeout, () if choice.plan is None else choice.plan.processes)
    bare = is_weightless(model)
    device = torch.get_default_device() if bare else home_of(model)
    args, kwargs = as_call(options.example)
    require_device(options.example, device)
    common = Settings(
        device,
        options.seed,
        read_recompute(options.recompute),
        Offload.read(options.offload),
        autocast_of(options.precision, device),
    )
    settings = tuple(_settings(choice.plan, common, stage) for stage in range(shape.stages))
    feed = Feed(ranks, options.data, device)
    if not ranks.alone:
        _agree(ranks, model, chosen, options)
    if bare:
        fill_buffers(model, device, options.weight_source)
    if bare and ranks.alone:  # all of it is run here
        materialise(model, [name for name, _ in model.named_parameters()], device, options.weight_source)
        bare = False
    if choice.plan is not None:
        cuts = choice.plan.cuts(layers_of(model, args, kwargs).names)
    with taken_by(model, args, kwargs):
        split = Split(model, shape.stages, args, kwargs, None if cuts is None else list(cuts))
    if not ranks.alone:
        split = agreed_split(ranks, split, args, kwargs, fixed=cuts is not None)
    require_sound(chosen, split.edges)
    _require_once(split, settings)
    if options.verify and not bare:
        compare_with_whole(split, args, kwargs, device)
    if isinstance(chosen.built, Loop):
        require_untied(split.ties(), shape)
    rows = None
    with suppress(InputError) if shape.turns else nullcontext():  # in turns, only a switch would need them
        rows = divided_rows(ranks, split, args, kwargs, device, bare) if ranks.replicated else None
    if not ranks.alone:
        _rehearse(split, args, kwargs)
    if bare:
        materialise(model, _needed(split, ranks.here), device, options.weight_source)
    return _joined(options, ranks, split, chosen, settings, feed, rows)


def _settings(plan: Planned | None, common: Settings, stage: int) -> Settings:
    """Return the settings of one stage: those of all, and those that a plan adds."""
    if plan is None:
        return common
    planned = plan.plan.stages[stage]
    return replace(
        common,
        recompute=Recompute.ALWAYS if planned.recompute else common.recompute,
        offload=common.offload | Offload.ACTIVATIONS if planned.offload else common.offload,
    )


def _joined(
    options: PipelineOptions,
    ranks: Ranks,
    split: Split,
    chosen: Chosen,
    settings: tuple[Settings, ...],
    feed: Feed,
    rows: ReplicaRows | None,
) -> Assembled:
    """Build the parts that depend on which stages this process runs."""
    model = split.model
    used, tied = [split.used(stage) for stage in range(split.pieces)], split.ties()
    if not ranks.alone:
        _require_parted_buffers(ranks, split)
    if ranks.replicated:
        require_steady_buffers(ranks, split)
        require_dense_gradients(ranks, split)
    named = dict(model.named_parameters())
    norms, buffers = DeferredNorms(model), Buffers(model)
    shared = {stage: [named[name] for name, users in tied.items() if stage in users] for stage in ranks.here}
    shared |= {stage: used[stage] for stage in ranks.here if ranks.replicas[stage] > 1}
    stages = [
        Stage(split, at, settings[at], norms, buffers, used[at], shared[at], replica)
        for at in ranks.here
        for replica in (range(ranks.replicas[at]) if ranks.alone else (ranks.replica,))
    ]
    device = settings[0].device
    lanes = _open(options, ranks, split.edges, tied, device, chosen.built.shape.turns)
    groups = tie_groups((named[name], users) for name, users in tied.items())
    ties = TiedWeights(groups, set(ranks.here), lanes, ranks.replicas, ranks.replica)
    owned = {at: split.parameters(at) for at in ranks.here}
    tied_weights = {named[name] for name in tied}
    sums = open_sums(ranks, stages, device, tied_weights, owned, options.shard) if ranks.replicated else None
    stepped = owned if sums is None or sums.sharded is None else owned | sums.sharded.owned
    optimizers = Optimizers(
        stepped, options.optimizer, options.lr_scheduler, options.clip, options.accumulate, options.precision == "fp16"
    )
    observers = Observers()
    first = {stage.index: stage for stage in reversed(stages)}
    optimizers.sharded = None if sums is None else sums.sharded
    for optimizer in optimizers.optimizers.values() if options.shard else ():
        require_elementwise(optimizer)
    flush = FlushUpdates(optimizers, first, ties, ranks.world, observers, sums)
    # Last, when nothing is left to refuse: from here on weights may move.
    swap = Swap([used[at] if Offload.WEIGHTS in settings[at].offload else [] for at in range(split.pieces)], device)
    optimizers.fetch = swap.turn
    split.tracing = swap.whole
    if not ranks.alone:
        release(model, [parameter for stage in stages for parameter in stage.parameters])
        guard(split)
        split.whole = False
        flush.spread_weights()
    names = {parameter: name for name, parameter in named.items()}
    context = EngineContext(
        ranks, stages, settings, optimizers, flush, lanes, ties, swap.turn, names, options.timeline, observers, rows,
        norms, chosen.built.shape,
    )  # fmt: skip
    return Assembled(split, context, build_engine(chosen, context, split.edges), norms, buffers, feed)


def _as_model(options: PipelineOptions) -> tuple[nn.Module, Sequence[str] | None, int | None]:
    """Return the model, its cuts, and the number of pipeline ranks if a list of stage modules implies it."""
    if isinstance(options.model, nn.Module):
        return options.model, options.cuts, None
    chain = Chain(list(options.model))
    cuts = [f"stages.{i}" for i in range(1, len(chain.stages))]
    return chain, cuts, len(chain.stages) // (options.chunks or 1)


def _require_once(split: Split, settings: tuple[Settings, ...]) -> None:
    again = [stage.recompute for stage in settings if stage.recompute is not Recompute.NEVER]
    for name, line in split.first.trace.written.items():
        if line and again:
            raise SplitError(
                "recompute='never' for a forward that changes weights, which it would do twice",
                f"{again[0].value!r} and {name!r} changed at {line}",
                "change it between two steps, or leave recompute out",
            )


def _agree(ranks: Ranks, model: nn.Module, chosen: Chosen, options: PipelineOptions) -> None:
    require_same_model(ranks, model)
    plan = chosen.choice.plan
    planned = {"plan": None if plan is None else plan.in_short()}
    schedule = {"schedule": describe(chosen), "micro-batches": chosen.choice.microbatches}
    placed = {"processes of every stage": [list(group) for group in ranks.members]}
    require_agreement(ranks, schedule | planned | placed | options.agreed())
    same_weights(ranks, model)


def _open(
    options: PipelineOptions,
    ranks: Ranks,
    edges: Sequence[tuple[int, int]],
    tied: dict[str, tuple[int, ...]],
    device: torch.device,
    turns: bool,
) -> Lanes | None:
    if isinstance(ranks.world, Alone):
        return None
    pairs = [(users[0], user) for users in tied.values() for user in users[1:]]
    names = lane_names(ranks.placement, edges, pairs, ranks.replicas, turns)
    return open_lanes(ranks.world, names, ranks.members, device, options.transport)


def _needed(split: Split, here: tuple[int, ...]) -> list[str]:
    return sorted({name for stage in here for name in split.uses(stage)})


def _require_parted_buffers(ranks: Ranks, split: Split) -> None:
    """Raise for a buffer that changes on two ranks: it would become two buffers."""
    users: dict[str, set[int]] = {}
    for at, event in enumerate(split.first.trace.events):
        for name in event.buffers:
            users.setdefault(name, set()).add(ranks.placement[split.first.stage_of(at)])
    for name, places in users.items():
        if len(places) > 1:
            raise SplitError(
                "a buffer that the forward changes to be used by one rank",
                f"{name!r} on ranks {sorted(places)}",
                "cut where one stage has all its uses",
            )


def _rehearse(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Trace the example, and its first row, in every mode while this process has all weights.

    A single row is traced too, as code that broadcasts may treat it differently.
    """
    modes = [(module, module.training) for module in split.model.modules()]
    given = [(args, kwargs), piece((args, kwargs), 0, 1)]
    try:
        for mode in (None, False, True):
            if mode is not None:
                split.model.train(mode)
            for gradients, (some, named) in product((torch.enable_grad, torch.no_grad), given):
                with gradients(), suppress(Exception):  # a model need not run in every mode
                    split.path(some, named)
    finally:
        for module, mode in modes:
            module.training = mode
