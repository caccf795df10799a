"""Build the engine for a schedule, over stages that exist: at the start, and whenever the schedule is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from penstock.comm.transport.interface import Lanes
from penstock.comm.world.world import World
from penstock.core.action import Op
from penstock.core.check import prove
from penstock.core.loop import Loop
from penstock.core.lowered_loop import ActionRow, LoweredLoop, slot_rows
from penstock.core.schedule import Schedule
from penstock.core.shape import Law, Shape
from penstock.engine.executor import Executor, StatusObserver, Updates, WeightSelection, failures_told
from penstock.engine.measure.activation_bytes import ActivationMeter
from penstock.engine.measure.clock import Clock
from penstock.engine.observer import Observer, Observers
from penstock.engine.replica_rows import ReplicaRows
from penstock.engine.stage_executor import StageExecutor
from penstock.engine.transfers import LocalTransfers, StageTransfers
from penstock.engine.weights.select import CurrentWeights, Mitigation, VersionedWeights
from penstock.engine.weights.ties import TiedWeights
from penstock.errors import InputError
from penstock.model.batchnorm import DeferredNorms
from penstock.model.offload import Offload
from penstock.model.reweigh import Reweigh
from penstock.model.stage import Settings, Stage
from penstock.training.async_updates import StageUpdates
from penstock.training.build_replicas import local_lanes, require_lanes, require_untied
from penstock.training.flush_updates import FlushUpdates
from penstock.training.loop_status import LoopStatus
from penstock.training.options import PipelineOptions
from penstock.training.processes import Ranks
from penstock.training.replica_versions import ReplicaVersions
from penstock.training.replicas import MiniBatchEnd
from penstock.training.schedule_choice import ScheduleChoice, read_schedule, require_shards, with_edges
from penstock.training.stage_optimizers import Optimizers
from penstock.training.staleness import MitigationOptions, momentum_steps, read_mitigation, require_known
from penstock.training.version_sums import VersionSums

SETTLED = ("stages", "chunks", "edges")  # of a pipeline, whatever its schedule


@dataclass
class EngineContext:
    """This process's stages and its lanes to the others, from which an engine is built for any schedule."""

    ranks: Ranks
    stages: list[Stage]
    settings: tuple[Settings, ...]  # of every stage, those of other processes too
    optimizers: Optimizers
    flush: FlushUpdates
    lanes: Lanes | None
    ties: TiedWeights
    fetch: Callable[[int], None]
    names: dict[nn.Parameter, str]
    timeline: bool
    observers: Observers
    rows: ReplicaRows | None  # how replicas divide micro-batches, where a stage has several
    norms: DeferredNorms
    opened: Shape  # of the schedule for which lanes were opened

    def slots(self, shape: Shape) -> tuple[int, ...]:
        """Return which slots of a shape this process runs."""
        ranks = self.ranks
        return tuple(range(shape.slots)) if self.lanes is None else (shape.slot(ranks.here[0], ranks.replica),)


@dataclass(frozen=True)
class Chosen:
    """A schedule, as it was chosen and as it was built, and its staleness mitigation."""

    choice: ScheduleChoice
    built: Schedule | Loop
    mitigation: MitigationOptions


@dataclass
class Engine:
    """An executor for a schedule, and the parts that serve this schedule alone.

    `rows`, by slot: those of a synchronous mini-batch before its updates, and its updates.
    """

    schedule: Schedule | Loop
    executor: Executor
    observers: tuple[Observer, ...]
    clock: Clock | None
    mitigation: MitigationOptions
    rows: tuple[list[list[ActionRow]], list[list[ActionRow]]] | None = None
    end: MiniBatchEnd | None = None  # with replicas
    meter: ActivationMeter | None = None
    updates: StageUpdates | None = None
    weights: VersionedWeights | None = None
    status: LoopStatus | None = None


def choose(choice: ScheduleChoice, options: PipelineOptions, cuts: Sequence[str] | None) -> Chosen:
    """Read the schedule, and refuse options that it does not go with."""
    _require_methods_own(choice.options)
    if isinstance(choice.schedule, str):
        require_known(choice.schedule, choice.options)
    built = read_schedule(choice, cuts)
    if choice.plan is not None:
        choice.plan.require_fit(built.shape)
    if options.shard is not None:
        _require_for_sharding(built, options)
    if isinstance(built, Loop):
        _require_for_streaming(options)
    mitigation = read_mitigation(choice.options, built.shape)
    if isinstance(built, Loop) and max(built.shape.replicas) > 1:
        _require_for_replicas(built, choice, options, mitigation)
    return Chosen(choice, built, mitigation)


def require_sound(chosen: Chosen, edges: tuple[tuple[int, int], ...]) -> None:
    """Refuse a schedule that breaks a law, before anything has moved."""
    built = with_edges(chosen.choice, chosen.built, edges)
    if isinstance(built, Schedule):
        prove(built)
    else:
        endless = LoweredLoop(built)
        endless.proven(endless.least)


def describe(chosen: Chosen) -> str:
    """Return a short description, for ranks to compare."""
    built = chosen.built
    actions = len(built) if isinstance(built, Schedule) else sum(map(len, (*built.fill, *built.body)))
    mitigation = f" with {chosen.mitigation}" if chosen.mitigation != MitigationOptions() else ""
    replicas = f" with {':'.join(map(str, built.shape.replicas))} replicas" if max(built.shape.replicas) > 1 else ""
    return f"{built.shape.name} of {actions} actions{replicas}{mitigation}"


def build_engine(chosen: Chosen, context: EngineContext, edges: tuple[tuple[int, int], ...]) -> Engine:
    """Prove the schedule and make its executor."""
    built = with_edges(chosen.choice, chosen.built, edges)
    require_lanes(built.shape, context.opened, context.rows)
    newest = built.shape.law is Law.NEWEST
    if isinstance(built, Schedule):
        engine = _synchronous(built, context)
    else:
        engine = _asynchronous(LoweredLoop(built), chosen.mitigation, context)
    for stage in context.stages:
        named = [(context.names[p], p) for p in stage.parameters]
        host = Offload.ACTIVATIONS in stage.settings.offload
        stage.reweigh = Reweigh(named, host, stage.split.model.buffers()) if newest else None
    return engine


def _synchronous(built: Schedule, context: EngineContext) -> Engine:
    schedule = prove(built).schedule
    slots = context.slots(schedule.shape)
    every = [slot_rows(schedule, slot) for slot in slots]
    split = {(row.stage, row.microbatch) for rows in every for row in rows if row.op is Op.I}
    is_split: Callable[[int, int], bool] = lambda stage, microbatch: (stage, microbatch) in split  # noqa: E731
    stages = _first_replicas(context, is_split)
    ends = {row.stage: row.microbatch for rows in every for row in rows if _goes_before(row)}
    weights, end = CurrentWeights(context.fetch), None
    if not context.ranks.replicated:
        executor = _executor(context, slots, stages, weights, context.flush, ends)
    else:
        by_slot = _by_slot(context, schedule.shape, stages)
        executor = _replicated(context, schedule.shape, stages, by_slot, weights, context.flush)
        end = MiniBatchEnd(context.ranks.world, _by_replica(by_slot), context.norms, schedule.shape.stages - 1)
    clock = Clock(slots) if context.timeline else None
    meter = (
        None if clock is None or context.lanes is None else ActivationMeter(stages, context.stages[0].settings.device)
    )
    flush = [next(at for at, row in enumerate(rows) if row.op is Op.UPDATE) for rows in every]
    before = [rows[:at] for rows, at in zip(every, flush, strict=True)]
    updates = [rows[at:] for rows, at in zip(every, flush, strict=True)]
    observers = _own_observers(context, clock)
    return Engine(schedule, executor, observers, clock, MitigationOptions(), (before, updates), end, meter)


def _first_replicas(context: EngineContext, is_split: Callable[[int, int], bool]) -> StageExecutor:
    """Return the executor of the stages that forwards alone run on: of a worker, its own."""
    return StageExecutor([stage for stage in context.stages if not stage.replica or context.lanes], is_split)


def _by_slot(context: EngineContext, shape: Shape, stages: StageExecutor) -> list[StageExecutor]:
    """Return the stage executor of every slot of this process: each replica has micro-batches of its own."""
    if context.lanes is not None:
        return [stages]
    own = {(stage.index, stage.replica): stage for stage in context.stages}
    places = [(shape.stages_of(int(rank)), int(shape.slot_replica[slot])) for slot, rank in enumerate(shape.slot_rank)]
    return [StageExecutor([own[at, replica] for at in here], stages.is_split) for here, replica in places]


def _by_replica(by_slot: list[StageExecutor]) -> dict[tuple[int, int], StageExecutor]:
    return {(at, stage.replica): part for part in by_slot for at, stage in part.stages.items()}


def _replicated(
    context: EngineContext,
    shape: Shape,
    stages: StageExecutor,
    by_slot: list[StageExecutor],
    weights: WeightSelection,
    updates: Updates,
    news: bool = False,
) -> Executor:
    """Return an executor of stages with replicas; `news`: losses go along with the tensors."""
    world, lanes = context.ranks.world, context.lanes or local_lanes(shape)
    device, by_replica = context.stages[0].settings.device, _by_replica(by_slot)
    transfers = StageTransfers(stages, lanes, device, news, rows=context.rows, by_replica=by_replica)
    guard = partial(failures_told, world.watch) if isinstance(world, World) else nullcontext
    return Executor(context.slots(shape), stages, transfers, weights, updates, context.observers, guard, by_slot)


def _goes_before(row: ActionRow) -> bool:
    """Return whether a row sends a gradient to the stage before."""
    return row.op is Op.SEND_B and row.peer == row.stage - 1


def _asynchronous(endless: LoweredLoop, mitigation: MitigationOptions, context: EngineContext) -> Engine:
    endless.proven(endless.least)
    shared = {parameter for group in context.ties.groups for parameter in group.parameters}
    own = {
        stage.index: [p for p in context.optimizers.owned[stage.index] if p not in shared] for stage in context.stages
    }
    foreseen = None
    if mitigation.predict == "spectrain":
        _require_own_weights(context)
        foreseen = momentum_steps(context.optimizers.optimizers)
    weights_of = Mitigation(mitigation.t2, mitigation.predict is not None, foreseen)
    here: dict[int, tuple[int, ...]] = {}
    for stage in context.stages:
        here[stage.index] = (*here.get(stage.index, ()), stage.replica)
    weights = VersionedWeights(endless, own, context.ties, weights_of, context.observers, here)
    rate = None if mitigation.t1 is None else lambda stage, step: mitigation.rate(endless, stage, step)
    slots, stages = context.slots(endless.shape), _first_replicas(context, _split_in(endless))
    replicas = _replica_versions(context, endless.shape)
    updates = StageUpdates(context.optimizers, weights, context.ties, endless.shape.stages - 1, rate, replicas)
    if replicas is None:
        executor = _executor(context, slots, stages, weights, updates)
    else:
        by_slot = _by_slot(context, endless.shape, stages)
        executor = _replicated(context, endless.shape, stages, by_slot, weights, updates, news=True)
    clock, world = Clock(slots, keep=1) if context.timeline else None, context.ranks.world
    status = LoopStatus(world.watch.status_page if isinstance(world, World) else None, context.lanes)
    observers = _own_observers(context, clock)
    return Engine(endless.loop, executor, observers, clock, mitigation, updates=updates, weights=weights, status=status)


def _replica_versions(context: EngineContext, shape: Shape) -> ReplicaVersions | None:
    """Return what joins the gradients of replicas to versions, where a stage has several."""
    if context.flush.sums is None:
        return None
    names = context.names
    require_untied({names[p]: group.stages for group in context.ties.groups for p in group.parameters}, shape)
    sums = VersionSums(context.ranks.replicas, context.flush.sums.reducers)
    return ReplicaVersions(shape, sums, context.norms, context.lanes is not None)


def _split_in(endless: LoweredLoop) -> Callable[[int, int], bool]:
    """Return which micro-batches of a loop have input and weight gradient apart, on which stages."""
    per_pass = endless.loop.period * endless.shape.microbatches
    split: set[tuple[int, int]] = set()  # stages, and micro-batches of a pass
    for rows in (*endless.loop.fill, *endless.loop.body):
        inputs = rows.op == Op.I
        split.update(zip(rows.stage[inputs].tolist(), (rows.microbatch[inputs] % per_pass).tolist(), strict=True))
    return lambda stage, microbatch: (stage, microbatch % per_pass) in split


def _executor(
    context: EngineContext,
    slots: tuple[int, ...],
    stages: StageExecutor,
    weights: WeightSelection,
    updates: Updates,
    ends: dict[int, int] | None = None,
) -> Executor:
    """Return an executor whose transfers are those of this process; without `ends`, losses and norms go along."""
    world = context.ranks.world
    if context.lanes is None or not isinstance(world, World):
        return Executor(slots, stages, LocalTransfers(), weights, updates, context.observers)
    device = context.stages[0].settings.device
    transfers = StageTransfers(stages, context.lanes, device, news=ends is None, last_backward=ends or {})
    return Executor(slots, stages, transfers, weights, updates, context.observers, partial(failures_told, world.watch))


def _own_observers(context: EngineContext, clock: Clock | None) -> tuple[Observer, ...]:
    """Return the status page's observer and the clock; the clock comes last, so that it reads what others take too."""
    world = context.ranks.world
    status = (StatusObserver(world.watch),) if isinstance(world, World) else ()
    return (*status, *(() if clock is None else (clock,)))


def _require_own_weights(context: EngineContext) -> None:
    """Raise for a shared weight: a copy is forecast by its owner's momentum, which another process does not have."""
    if context.ties.groups and not context.ranks.alone:
        raise InputError(
            "predict='spectrain' for weights that one stage uses alone",
            f"{context.names[context.ties.groups[0].parameters[0]]}, which stages of different processes share",
            "use predict='xpipe'",
        )


def _require_for_sharding(built: Schedule | Loop, options: PipelineOptions) -> None:
    """Refuse to divide state where nothing can be divided, or the result would not be that of one process."""
    require_shards(built)
    expected = f"shard={options.shard!r} with "
    if options.optimizer is None:
        raise InputError(expected + "an optimizer, whose state is divided", "none", "give optimizer=")
    if Offload.WEIGHTS in Offload.read(options.offload):
        raise InputError(
            expected + "weights that stay on their device", f"offload={options.offload!r}", "leave one out"
        )


def _require_methods_own(options: dict[str, Any]) -> None:
    """Raise for options that would change the number of stages or their places, which a Pipeline keeps."""
    settled = [name for name in SETTLED if name in options]
    if settled:
        raise InputError(
            "options of the schedule's own method",
            ", ".join(settled),
            "leave it out: the Pipeline's stages stay as they are; make one of its own for others",
        )


def _require_for_replicas(
    built: Loop, choice: ScheduleChoice, options: PipelineOptions, mitigation: MitigationOptions
) -> None:
    """Raise for an option that has no exact meaning, as yet, where replicas make versions without a flush."""
    shape = built.shape
    expected, advice = "", "leave it out, or give every stage one replica"
    if shape.law is Law.NEWEST:
        expected, came = "weights that are stashed", f"{shape.name}, whose backward takes the newest"
        advice = "use pipedream or 2bw, or give every stage one replica"
    elif mitigation != MitigationOptions():
        expected, came = "no mitigation of stale weights", str(mitigation)
    elif options.precision == "fp16":
        expected, came = "no loss scale", "precision='fp16'"
        advice = "use bf16, or give every stage one replica"
    elif options.clip is not None and not shape.turns and choice.schedule != "2bw":
        expected, came = "no norm over all stages, which is agreed on by the order of 2bw,", f"clip={options.clip}"
    elif shape.turns and any(built.period % replicas for replicas in shape.replicas):
        expected, came = "a loop of whole rounds", f"one of {built.period} mini-batches for {list(shape.replicas)}"
        advice = "give it a multiple of every stage's replicas"
    if expected:
        raise InputError(f"{expected} where stages have replicas and no flush", came, advice)


def _require_for_streaming(options: PipelineOptions) -> None:
    if options.optimizer is None:
        raise InputError("an optimizer under an asynchronous schedule", "none", "give optimizer=")
    if options.accumulate != 1:
        raise InputError(
            "accumulate=1 under an asynchronous schedule, where every mini-batch makes an update",
            options.accumulate,
            "use more micro-batches",
        )
    if Offload.WEIGHTS in Offload.read(options.offload):
        raise InputError(
            "weights that stay on their device under an asynchronous schedule, which keeps versions of them",
            f"offload={options.offload!r}",
            "use offload='activations'",
        )
