"""An engine for a schedule, over stages that are there: at the start, and whenever the schedule is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from penstock.app.crew import Crew
from penstock.app.optimize import Optimizers
from penstock.app.remedies import Remedies, momentum_steps, read_remedies, require_known, without_remedies
from penstock.app.rounds import Rounds
from penstock.app.settings import Asked, Wanted, read_schedule, with_edges
from penstock.core.check import prove
from penstock.core.loop import Loop
from penstock.core.lowered_loop import LoweredLoop
from penstock.core.schedule import Schedule
from penstock.core.shape import Law
from penstock.engine.clock import Clock, RunClock
from penstock.engine.inline import InlineEngine
from penstock.engine.lanes import Lanes
from penstock.engine.stream import InlineStream, WorkerStream
from penstock.engine.tie_groups import TieMail
from penstock.engine.weights import Remedy, Weights
from penstock.engine.worker import Worker
from penstock.engine.world import World
from penstock.errors import InputError
from penstock.model.offload import Offload
from penstock.model.reweigh import Reweigh
from penstock.model.stage import Settings, Stage

SETTLED = ("stages", "chunks", "edges")  # of a pipeline, whatever its schedule
Engine = InlineEngine | Worker | InlineStream | WorkerStream


@dataclass
class Floor:
    """What engines stand on, whatever the schedule: this process's stages and its ways to the others."""

    crew: Crew
    stages: list[Stage]
    settings: tuple[Settings, ...]  # of every stage, those of other processes too
    optimizers: Optimizers
    lanes: Lanes | None
    mail: TieMail
    turn: Callable[[int], None]
    names: dict[nn.Parameter, str]
    timeline: bool


@dataclass(frozen=True)
class Chosen:
    """A schedule that was read, and what goes with it."""

    asked: Asked
    built: Schedule | Loop
    remedies: Remedies


@dataclass
class Equipped:
    """An engine, and what belongs to it alone."""

    schedule: Schedule | Loop
    engine: Engine
    clock: Clock | RunClock | None
    rounds: Rounds | None = None
    remedies: Remedies = field(default_factory=Remedies)


def choose(wanted: Wanted, stages: int | None, cuts: Sequence[str] | None) -> Chosen:
    """Read which schedule is wanted."""
    _require_methods_own(wanted.options)
    if isinstance(wanted.schedule, str):
        require_known(wanted.schedule, wanted.options)
    asked = Asked(wanted.schedule, stages, wanted.microbatches, wanted.chunks, without_remedies(wanted.options))
    built = read_schedule(asked, cuts)
    if wanted.plan is not None:
        wanted.plan.require_fit(built.shape)
    if isinstance(built, Loop):
        _require_for_streaming(wanted)
    return Chosen(asked, built, read_remedies(wanted.options, built.shape))


def require_sound(chosen: Chosen, edges: tuple[tuple[int, int], ...]) -> None:
    """Refuse a schedule that breaks a law, before anything has moved."""
    built = with_edges(chosen.asked, chosen.built, edges)
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
    return f"{built.shape.name} of {actions} actions{remedies}"


def equip(chosen: Chosen, floor: Floor, edges: tuple[tuple[int, int], ...]) -> Equipped:
    """Prove the schedule and make its engine."""
    built = with_edges(chosen.asked, chosen.built, edges)
    newest = built.shape.law is Law.NEWEST
    if isinstance(built, Schedule):
        equipped = _synchronous(built, floor)
    else:
        equipped = _asynchronous(LoweredLoop(built), chosen.remedies, floor)
    for stage in floor.stages:
        named = [(floor.names[p], p) for p in stage.parameters]
        host = Offload.ACTIVATIONS in stage.settings.offload
        stage.reweigh = Reweigh(named, host, stage.split.model.buffers()) if newest else None
    return equipped


def _synchronous(built: Schedule, floor: Floor) -> Equipped:
    proven = prove(built)
    clock = Clock() if floor.timeline else None
    if floor.lanes is None:
        return Equipped(proven.schedule, InlineEngine(proven, floor.stages, floor.turn, clock), clock)
    assert isinstance(floor.crew.world, World)
    world = floor.crew.world
    engine = Worker(proven, world.rank, floor.stages, floor.lanes, world.watch, floor.turn, clock)
    return Equipped(proven.schedule, engine, clock)


def _asynchronous(endless: LoweredLoop, remedies: Remedies, floor: Floor) -> Equipped:
    endless.proven(endless.least)
    shared = {parameter for group in floor.mail.groups for parameter in group.parameters}
    own = {stage.index: [p for p in floor.optimizers.owned[stage.index] if p not in shared] for stage in floor.stages}
    foreseen = None
    if remedies.predict == "spectrain":
        _require_own_weights(floor)
        foreseen = momentum_steps(floor.optimizers.optimizers)
    remedy = Remedy(remedies.t2, remedies.predict is not None, foreseen)
    weights = Weights(endless, own, floor.mail, remedy)
    rate = None if remedies.t1 is None else lambda stage, step: remedies.rate(endless, stage, step)
    rounds = Rounds(floor.optimizers, weights, floor.mail, endless.shape.stages - 1, rate)
    if floor.lanes is None:
        clocks = [RunClock() for _ in range(endless.shape.slots)] if floor.timeline else []
        inline = InlineStream(endless, floor.stages, weights, rounds, clocks)
        return Equipped(endless.loop, inline, None, rounds, remedies)
    assert isinstance(floor.crew.world, World)
    clock, world = RunClock() if floor.timeline else None, floor.crew.world
    worker = WorkerStream(endless, world.rank, floor.stages, weights, rounds, floor.lanes, world.watch, clock)
    return Equipped(endless.loop, worker, clock, rounds, remedies)


def _require_own_weights(floor: Floor) -> None:
    """A copy of a weight is forecast by its owner's momentum, which another process does not have."""
    if floor.mail.groups and not floor.crew.alone:
        raise InputError(
            "predict='spectrain' for weights that one stage uses alone",
            f"{floor.names[floor.mail.groups[0].parameters[0]]}, which stages of different processes share",
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


def _require_for_streaming(wanted: Wanted) -> None:
    if wanted.optimizer is None:
        raise InputError("an optimizer under an asynchronous schedule", "none", "give optimizer=")
    if wanted.accumulate != 1:
        raise InputError(
            "accumulate=1 under an asynchronous schedule, where every mini-batch makes an update",
            wanted.accumulate,
            "use more micro-batches",
        )
    if Offload.WEIGHTS in Offload.read(wanted.offload):
        raise InputError(
            "weights that stay on their device under an asynchronous schedule, which keeps versions of them",
            f"offload={wanted.offload!r}",
            "use offload='activations'",
        )
