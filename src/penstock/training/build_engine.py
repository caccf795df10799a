"""An executor for a schedule, over stages that are there: at the start, and whenever the schedule is changed."""

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
from penstock.engine.weights.select import CurrentWeights, Remedy, VersionedWeights
from penstock.engine.weights.ties import TiedWeights
from penstock.errors import InputError
from penstock.model.batchnorm import DeferredNorms
from penstock.model.offload import Offload
from penstock.model.reweigh import Reweigh
from penstock.model.stage import Settings, Stage
from penstock.training.async_updates import StageUpdates
from penstock.training.build_replicas import local_lanes
from penstock.training.flush_updates import FlushUpdates
from penstock.training.loop_status import LoopStatus
from penstock.training.options import PipelineOptions
from penstock.training.processes import Crew
from penstock.training.replicas import MiniBatchEnd
from penstock.training.schedule_choice import ScheduleChoice, read_schedule, with_edges
from penstock.training.stage_optimizers import Optimizers
from penstock.training.staleness import Remedies, momentum_steps, read_remedies, require_known

SETTLED = ("stages", "chunks", "edges")  # of a pipeline, whatever its schedule


@dataclass
class Ground:
    """What executors are built on, whatever the schedule: this process's stages and its ways to the others."""

    crew: Crew
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

    def slots(self, shape: Shape) -> tuple[int, ...]:
        """Return which slots of a shape this process runs."""
        return tuple(range(shape.slots)) if self.lanes is None else (self.crew.world.rank,)


@dataclass(frozen=True)
class Chosen:
    """A schedule that was read, and what goes with it."""

    choice: ScheduleChoice
    built: Schedule | Loop
    remedies: Remedies


@dataclass
class Engine:
    """An executor for a schedule, and what belongs to it alone. `rows` are those of a synchronous mini-batch before its
    updates, and the updates, by slot."""

    schedule: Schedule | Loop
    executor: Executor
    observers: tuple[Observer, ...]
    clock: Clock | None
    remedies: Remedies
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
    if isinstance(built, Loop):
        _require_for_streaming(options)
    return Chosen(choice, built, read_remedies(choice.options, built.shape))


def require_sound(chosen: Chosen, edges: tuple[tuple[int, int], ...]) -> None:
    """Refuse a schedule that breaks a law, before anything has moved."""
    built = with_edges(chosen.choice, chosen.built, edges)
    if isinstance(built, Schedule):
        prove(built)
    else:
        endless = LoweredLoop(built)
        endless.proven(endless.least)


def describe(chosen: Chosen) -> str:
    """In a few words, for ranks to compare."""
    built = chosen.built
    actions = len(built) if isinstance(built, Schedule) else sum(map(len, (*built.fill, *built.body)))
    remedies = f" with {chosen.remedies}" if chosen.remedies != Remedies() else ""
    replicas = f" with {':'.join(map(str, built.shape.replicas))} replicas" if max(built.shape.replicas) > 1 else ""
    return f"{built.shape.name} of {actions} actions{replicas}{remedies}"


def build_engine(chosen: Chosen, ground: Ground, edges: tuple[tuple[int, int], ...]) -> Engine:
    """Prove the schedule and make its executor."""
    built = with_edges(chosen.choice, chosen.built, edges)
    newest = built.shape.law is Law.NEWEST
    if isinstance(built, Schedule):
        engine = _synchronous(built, ground)
    else:
        engine = _asynchronous(LoweredLoop(built), chosen.remedies, ground)
    for stage in ground.stages:
        named = [(ground.names[p], p) for p in stage.parameters]
        host = Offload.ACTIVATIONS in stage.settings.offload
        stage.reweigh = Reweigh(named, host, stage.split.model.buffers()) if newest else None
    return engine


def _synchronous(built: Schedule, ground: Ground) -> Engine:
    schedule = prove(built).schedule
    slots = ground.slots(schedule.shape)
    every = [slot_rows(schedule, slot) for slot in slots]
    split = {(row.stage, row.microbatch) for rows in every for row in rows if row.op is Op.I}
    is_split: Callable[[int, int], bool] = lambda stage, microbatch: (stage, microbatch) in split  # noqa: E731
    stages = StageExecutor([stage for stage in ground.stages if not stage.replica or ground.lanes], is_split)
    ends = {row.stage: row.microbatch for rows in every for row in rows if _goes_before(row)}
    weights, end = CurrentWeights(ground.fetch), None
    if ground.rows is None:
        executor = _executor(ground, slots, stages, weights, ground.flush, ends)
    else:
        executor, end = _replicated(ground, ground.rows, schedule.shape, stages, is_split, weights)
    clock = Clock(slots) if ground.timeline else None
    meter = None if clock is None or ground.lanes is None else ActivationMeter(stages, ground.stages[0].settings.device)
    flush = [next(at for at, row in enumerate(rows) if row.op is Op.UPDATE) for rows in every]
    before = [rows[:at] for rows, at in zip(every, flush, strict=True)]
    updates = [rows[at:] for rows, at in zip(every, flush, strict=True)]
    observers = _own_observers(ground, clock)
    return Engine(schedule, executor, observers, clock, Remedies(), (before, updates), end, meter)


def _replicated(
    ground: Ground,
    rows: ReplicaRows,
    shape: Shape,
    stages: StageExecutor,
    is_split: Callable[[int, int], bool],
    weights: WeightSelection,
) -> tuple[Executor, MiniBatchEnd]:
    """Return an executor of stages with replicas, each with rows of its own, and what ends its mini-batches."""
    slots, world = ground.slots(shape), ground.crew.world
    own = {(stage.index, stage.replica): stage for stage in ground.stages}
    by_slot = [stages]
    if ground.lanes is None:
        places = [(shape.stages_of(int(shape.slot_rank[slot])), int(shape.slot_replica[slot])) for slot in slots]
        by_slot = [StageExecutor([own[at, replica] for at in here], is_split) for here, replica in places]
    by_replica = {(at, stage.replica): part for part in by_slot for at, stage in part.stages.items()}
    lanes = ground.lanes or local_lanes(shape)
    transfers = StageTransfers(stages, lanes, ground.stages[0].settings.device, rows=rows, by_replica=by_replica)
    guard = partial(failures_told, world.watch) if isinstance(world, World) else nullcontext
    executor = Executor(slots, stages, transfers, weights, ground.flush, ground.observers, guard, by_slot)
    return executor, MiniBatchEnd(world, by_replica, ground.norms, shape.stages - 1)


def _goes_before(row: ActionRow) -> bool:
    """Return whether a row sends a gradient to the stage before."""
    return row.op is Op.SEND_B and row.peer == row.stage - 1


def _asynchronous(endless: LoweredLoop, remedies: Remedies, ground: Ground) -> Engine:
    endless.proven(endless.least)
    shared = {parameter for group in ground.ties.groups for parameter in group.parameters}
    own = {stage.index: [p for p in ground.optimizers.owned[stage.index] if p not in shared] for stage in ground.stages}
    foreseen = None
    if remedies.predict == "spectrain":
        _require_own_weights(ground)
        foreseen = momentum_steps(ground.optimizers.optimizers)
    remedy = Remedy(remedies.t2, remedies.predict is not None, foreseen)
    weights = VersionedWeights(endless, own, ground.ties, remedy, ground.observers)
    rate = None if remedies.t1 is None else lambda stage, step: remedies.rate(endless, stage, step)
    updates = StageUpdates(ground.optimizers, weights, ground.ties, endless.shape.stages - 1, rate)
    slots = ground.slots(endless.shape)
    executor = _executor(ground, slots, StageExecutor(ground.stages, _split_in(endless)), weights, updates)
    clock, world = Clock(slots, keep=1) if ground.timeline else None, ground.crew.world
    status = LoopStatus(world.watch.status_page if isinstance(world, World) else None, ground.lanes)
    observers = _own_observers(ground, clock)
    return Engine(endless.loop, executor, observers, clock, remedies, updates=updates, weights=weights, status=status)


def _split_in(endless: LoweredLoop) -> Callable[[int, int], bool]:
    """Return which micro-batches of a loop have input and weight gradient apart, on which stages."""
    per_pass = endless.loop.period * endless.shape.microbatches
    split: set[tuple[int, int]] = set()  # stages, and micro-batches of a pass
    for rows in (*endless.loop.fill, *endless.loop.body):
        inputs = rows.op == Op.I
        split.update(zip(rows.stage[inputs].tolist(), (rows.microbatch[inputs] % per_pass).tolist(), strict=True))
    return lambda stage, microbatch: (stage, microbatch % per_pass) in split


def _executor(
    ground: Ground,
    slots: tuple[int, ...],
    stages: StageExecutor,
    weights: WeightSelection,
    updates: Updates,
    ends: dict[int, int] | None = None,
) -> Executor:
    """Return an executor whose transfers are those of this process; without `ends`, losses and norms go along."""
    world = ground.crew.world
    if ground.lanes is None or not isinstance(world, World):
        return Executor(slots, stages, LocalTransfers(), weights, updates, ground.observers)
    device = ground.stages[0].settings.device
    transfers = StageTransfers(stages, ground.lanes, device, news=ends is None, last_backward=ends or {})
    return Executor(slots, stages, transfers, weights, updates, ground.observers, partial(failures_told, world.watch))


def _own_observers(ground: Ground, clock: Clock | None) -> tuple[Observer, ...]:
    """Return the status page's observer and the clock; the clock comes last, so that it reads what others take too."""
    world = ground.crew.world
    status = (StatusObserver(world.watch),) if isinstance(world, World) else ()
    return (*status, *(() if clock is None else (clock,)))


def _require_own_weights(ground: Ground) -> None:
    """A copy of a weight is forecast by its owner's momentum, which another process does not have."""
    if ground.ties.groups and not ground.crew.alone:
        raise InputError(
            "predict='spectrain' for weights that one stage uses alone",
            f"{ground.names[ground.ties.groups[0].parameters[0]]}, which stages of different processes share",
            "use predict='xpipe'",
        )


def _require_methods_own(options: dict[str, Any]) -> None:
    """The model's stages are a Pipeline's for good: no option of a schedule says how many there are, or where."""
    settled = [name for name in SETTLED if name in options]
    if settled:
        raise InputError(
            "options of the schedule's own method",
            ", ".join(settled),
            "leave it out: the Pipeline's stages stay as they are; make one of its own for others",
        )


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
