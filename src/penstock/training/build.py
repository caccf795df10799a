"""Build the parts of a pipeline from the user's options: split, proven schedule, stages, engine, optimizers.

All ranks use one split: rank 0 says where the model is cut, and the values that cross a cut are compared by name. A
forward may do the same things in another order on each rank, where it goes through a set, say; then ranks number their
values in another way, and only names tell which is which.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from penstock.comm.transport.interface import Lanes, lane_names
from penstock.comm.transport.open import open_lanes, wish_of
from penstock.comm.world.world import Alone
from penstock.engine.observer import Observers
from penstock.engine.passage_words import other_forward
from penstock.engine.replica_rows import ReplicaRows
from penstock.engine.weights.ties import TiedWeights, tie_groups
from penstock.errors import SplitError
from penstock.model.batch import as_call, piece, require_device
from penstock.model.batchnorm import DeferredNorms
from penstock.model.buffers import Buffers
from penstock.model.chain import Chain
from penstock.model.layers import layers_of
from penstock.model.materialise import fill_buffers, is_weightless, materialise
from penstock.model.naming import name_of
from penstock.model.offload import Offload, Swap
from penstock.model.split import Cuts, Split
from penstock.model.stage import Recompute, Settings, Stage
from penstock.training.batches import Feed, taken_by
from penstock.training.build_engine import Chosen, Engine, Ground, build_engine, choose, describe, require_sound
from penstock.training.build_replicas import divided_rows, open_sums, require_dense_gradients, require_steady_buffers
from penstock.training.first_step import compare_with_whole
from penstock.training.flush_updates import FlushUpdates
from penstock.training.model_state import guard, release
from penstock.training.options import Wanted, home_of, read_precision, read_recompute
from penstock.training.processes import Crew, muster, require_agreement, require_same_model, same_weights
from penstock.training.stage_optimizers import Optimizers

ROUNDS = 16  # of choosing cuts again


def agreed_split(crew: Crew, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], fixed: bool) -> Split:
    """The split with rank 0's cuts; where these are `fixed`, by a user or a plan, with them or not at all.

    Refuses ranks whose stages would exchange different values.
    """
    first, bad = crew.world.rank == 0, [0]
    avoid: frozenset[int] = frozenset()
    for _ in range(ROUNDS):
        opened, calls, before = crew.told([sorted(split.decided().opened), split.decided().calls, _before(split)], 0)
        cuts = Cuts(frozenset(opened), tuple((name, key) for name, key in calls))
        mine, bad = _compared(split, cuts, before, args, kwargs)
        every = [set(json.loads(part)) for part in crew.world.gather(json.dumps(bad).encode())]
        bad = sorted(set().union(*every))
        if not bad:
            assert mine is not None
            split = mine
            break
        if fixed:
            break
        avoid |= {calls[at][1] for at in bad}
        again = _chosen_again(split, avoid, args, kwargs) if first else None
        if not crew.told(again is not None, 0):
            break
        split = again or split
    if bad:
        raise other_forward(f"other calls before {calls[bad[0]][0]!r}")
    _require_same_exchange(crew, split)
    return split


def _before(split: Split) -> list[int]:
    """For every cut, one number of all that runs before it."""
    path = split.first
    names = [sorted(e.key for e in path.trace.events[:start] if not e.free) for start in path.starts[1:]]
    return [name_of(*some) for some in names]


def _compared(
    split: Split, cuts: Cuts, before: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Split | None, list[int]]:
    """The split with rank 0's cuts, and those cuts before which other things are called here."""
    if cuts != split.decided():
        try:
            split = Split(split.model, split.pieces, args, kwargs, cuts)
        except SplitError:
            return None, [at for at, (_, key) in enumerate(cuts.calls) if key not in split.first.trace.event_names] or [
                0
            ]
    mine = _before(split)
    return split, [at for at in range(len(mine)) if mine[at] != before[at]]


def _chosen_again(split: Split, avoid: frozenset[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split | None:
    try:
        return Split(split.model, split.pieces, args, kwargs, avoid=avoid)
    except SplitError:
        return None


def _require_same_exchange(crew: Crew, split: Split) -> None:
    every = [json.loads(part) for part in crew.world.gather(json.dumps(_exchanged(split)).encode())]
    for rank, theirs in enumerate(every):
        for name in every[0] | theirs:
            if every[0].get(name) != theirs.get(name):
                what = every[0].get(name) or theirs.get(name)
                raise other_forward(f"{what} on {'rank 0' if name in every[0] else f'rank {rank}'} alone")


def _exchanged(split: Split) -> dict[str, str]:
    """What crosses between stages, and which stage owns each parameter: what it is called, and what it is."""
    path = split.first
    found = {name: f"parameter {name!r} on stage {stage}" for name, stage in split.owner.items()}
    for stage, values in enumerate(path.incoming):
        for value, source in values.items():
            event = path.trace.events[path.trace.values[value].made_by]
            found[f"{path.trace.values[value].key}"] = f"{event.name!r} from stage {source} to {stage}"
    return found


@dataclass
class Assembled:
    """The parts of one process's share in a pipeline."""

    split: Split
    ground: Ground
    engine: Engine
    norms: DeferredNorms
    buffers: Buffers
    feed: Feed


def assemble(wanted: Wanted) -> Assembled:
    """Build everything; what is refused is refused before anything of the model's has moved."""
    model, cuts, stages = _as_model(wanted)
    chosen = choose(wanted, stages, cuts)
    shape = chosen.built.shape
    crew = muster(shape, wanted.timeout)
    bare = is_weightless(model)
    device = torch.get_default_device() if bare else home_of(model)
    args, kwargs = as_call(wanted.example)
    require_device(wanted.example, device)
    wish_of(wanted.transport)  # whatever it says, it must be sense: the same script may run on several ranks
    moves = Offload.read(wanted.offload)
    precision = read_precision(wanted.precision, device)
    common = Settings(device, wanted.seed, read_recompute(wanted.recompute), moves, precision)
    settings = tuple(_settings(wanted, common, stage) for stage in range(shape.stages))
    feed = Feed(crew, wanted.data, device)
    if not crew.alone:
        _agree(crew, model, chosen, wanted)
    if bare:
        fill_buffers(model, device, wanted.load)
    if bare and crew.alone:  # all of it is run here
        materialise(model, [name for name, _ in model.named_parameters()], device, wanted.load)
        bare = False
    if wanted.plan is not None:
        cuts = wanted.plan.cuts(layers_of(model, args, kwargs).names)
    with taken_by(model, args, kwargs):
        split = Split(model, shape.stages, args, kwargs, None if cuts is None else list(cuts))
    if not crew.alone:
        split = agreed_split(crew, split, args, kwargs, fixed=cuts is not None)
    require_sound(chosen, split.edges)
    _require_once(split, settings)
    if wanted.verify and not bare:
        compare_with_whole(split, args, kwargs, device)
    rows = divided_rows(crew, split, args, kwargs, device, bare) if crew.replicated else None
    if not crew.alone:
        _rehearse(split, args, kwargs)
    if bare:
        materialise(model, _needed(split, crew.here), device, wanted.load)
    return _joined(wanted, crew, split, chosen, settings, feed, rows)


def _settings(wanted: Wanted, common: Settings, stage: int) -> Settings:
    """What is asked of all stages, and what a plan asks of one besides."""
    if wanted.plan is None:
        return common
    planned = wanted.plan.plan.stages[stage]
    return replace(
        common,
        recompute=Recompute.ALWAYS if planned.recompute else common.recompute,
        offload=common.offload | Offload.ACTIVATIONS if planned.offload else common.offload,
    )


def _joined(
    wanted: Wanted,
    crew: Crew,
    split: Split,
    chosen: Chosen,
    settings: tuple[Settings, ...],
    feed: Feed,
    rows: ReplicaRows | None,
) -> Assembled:
    """The parts that depend on which stages are this process's."""
    model = split.model
    used, tied = [split.used(stage) for stage in range(split.pieces)], split.ties()
    if not crew.alone:
        _require_parted_buffers(crew, split)
    if crew.replicated:
        require_steady_buffers(crew, split)
        require_dense_gradients(crew, split)
    named = dict(model.named_parameters())
    norms, buffers = DeferredNorms(model), Buffers(model)
    shared = {stage: [named[name] for name, users in tied.items() if stage in users] for stage in crew.here}
    shared |= {stage: used[stage] for stage in crew.here if crew.replicas[stage] > 1}
    stages = [
        Stage(split, at, settings[at], norms, buffers, used[at], shared[at], replica)
        for at in crew.here
        for replica in (range(crew.replicas[at]) if crew.alone else (crew.replica,))
    ]
    device = settings[0].device
    lanes = _open(wanted, crew, split.edges, tied, device)
    groups = tie_groups((named[name], users) for name, users in tied.items())
    ties = TiedWeights(groups, set(crew.here), lanes, crew.replicas, crew.replica)
    owned = {at: split.parameters(at) for at in crew.here}
    optimizers = Optimizers(
        owned, wanted.optimizer, wanted.lr_scheduler, wanted.clip, wanted.accumulate, wanted.precision == "fp16"
    )
    observers = Observers()
    first = {stage.index: stage for stage in reversed(stages)}
    sums = None if rows is None else open_sums(crew, stages, device)
    flush = FlushUpdates(optimizers, first, ties, crew.world, observers, sums)
    # Last, when nothing is left to refuse: from here on weights may move.
    swap = Swap([used[at] if Offload.WEIGHTS in settings[at].offload else [] for at in range(split.pieces)], device)
    optimizers.fetch = swap.turn
    split.tracing = swap.whole
    if not crew.alone:
        release(model, [parameter for stage in stages for parameter in stage.parameters])
        guard(split)
        split.whole = False
        flush.spread_weights()
    names = {parameter: name for name, parameter in named.items()}
    ground = Ground(
        crew, stages, settings, optimizers, flush, lanes, ties, swap.turn, names, wanted.timeline, observers, rows,
        norms,
    )  # fmt: skip
    return Assembled(split, ground, build_engine(chosen, ground, split.edges), norms, buffers, feed)


def _as_model(wanted: Wanted) -> tuple[nn.Module, Any, int | None]:
    if isinstance(wanted.model, nn.Module):
        return wanted.model, wanted.cuts, wanted.stages
    chain = Chain(list(wanted.model))
    return chain, [f"stages.{i}" for i in range(1, len(chain.stages))], len(chain.stages)


def _require_once(split: Split, settings: tuple[Settings, ...]) -> None:
    again = [stage.recompute for stage in settings if stage.recompute is not Recompute.NEVER]
    for name, line in split.first.trace.written.items():
        if line and again:
            raise SplitError(
                "recompute='never' for a forward that changes weights, which it would do twice",
                f"{again[0].value!r} and {name!r} changed at {line}",
                "change it between two steps, or leave recompute out",
            )


def _agree(crew: Crew, model: nn.Module, chosen: Chosen, wanted: Wanted) -> None:
    require_same_model(crew, model)
    require_agreement(
        crew,
        {
            "schedule": describe(chosen),
            "micro-batches": wanted.microbatches,
            "replicas": list(crew.replicas),
            "cuts": None if wanted.cuts is None else list(wanted.cuts),
            "plan": None if wanted.plan is None else wanted.plan.in_short(),
            "seed": wanted.seed,
            "precision": wanted.precision,
            "recompute": wanted.recompute,
            "clip": wanted.clip,
            "accumulate": wanted.accumulate,
            "data": wanted.data,
        },
    )
    same_weights(crew, model)


def _open(
    wanted: Wanted,
    crew: Crew,
    edges: Sequence[tuple[int, int]],
    tied: dict[str, tuple[int, ...]],
    device: torch.device,
) -> Lanes | None:
    if isinstance(crew.world, Alone):
        return None
    pairs = [(users[0], user) for users in tied.values() for user in users[1:]]
    names = lane_names(crew.placement, edges, pairs, crew.replicas)
    return open_lanes(crew.world, names, crew.placement, device, wanted.transport)


def _needed(split: Split, here: tuple[int, ...]) -> list[str]:
    return sorted({name for stage in here for name in split.uses(stage)})


def _require_parted_buffers(crew: Crew, split: Split) -> None:
    """A buffer that changes on two ranks would become two buffers."""
    places: dict[str, set[int]] = {}
    for at, event in enumerate(split.first.trace.events):
        for name in event.buffers:
            places.setdefault(name, set()).add(crew.placement[split.first.stage_of(at)])
    for name, ranks in places.items():
        if len(ranks) > 1:
            raise SplitError(
                "a buffer that the forward changes to be used by one rank",
                f"{name!r} on ranks {sorted(ranks)}",
                "cut where one stage has all its uses",
            )


def _rehearse(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Trace the example in every mode while all weights are here; later there is only one stage's. One row of it, too:
    code that broadcasts may treat that in a way of its own."""
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
