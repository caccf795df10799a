"""Which schedule a Pipeline trains by: named, the user's own, or a plan's; fitted to the model's stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.core.check import prove
from penstock.core.loop import Loop
from penstock.core.lower import lower
from penstock.core.schedule import Schedule
from penstock.core.shape import Law
from penstock.errors import InputError
from penstock.schedules.registry import find
from penstock.schedules.registry import loop as build_loop
from penstock.schedules.registry import schedule as build_schedule
from penstock.training.option_checks import check_schedule
from penstock.training.options import PipelineOptions
from penstock.training.plan_options import ITS_OWN, Planned, read_plan, require_alone
from penstock.training.staleness import without_mitigation


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule, by name with its options or the user's own, and the numbers of stages and micro-batches."""

    schedule: str | Schedule | Loop
    stages: int | None
    microbatches: int
    chunks: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the method, and of staleness mitigation
    plan: Planned | None = None
    replicas: int | Sequence[int] = 1  # of every rank, or of each

    @property
    def method_options(self) -> dict[str, Any]:
        return without_mitigation(self.options)

    def build(self, stages: int, edges: Sequence[tuple[int, int]] = ()) -> Schedule | Loop:
        """Return the named schedule for so many pipeline ranks."""
        assert isinstance(self.schedule, str)
        given: dict[str, Any] = {"microbatches": self.microbatches, "edges": edges, **self.method_options}
        given["replicas"] = self.replicas
        if find(self.schedule).asynchronous:
            if self.chunks not in (None, 1):
                raise InputError(f"one chunk a rank for {self.schedule}", self.chunks, "leave chunks out")
            return build_loop(self.schedule, stages=stages, **given)
        # The user's number of stages decides how many pieces the model is cut into, not a search for the best one.
        chunks = 1 if self.chunks is None and self.schedule == "auto" else self.chunks
        return build_schedule(self.schedule, stages=stages, chunks=chunks, **given)


def read_choice(options: PipelineOptions, others: dict[str, Any]) -> ScheduleChoice:
    """Return the choice of the plan, beside which nothing else may be given, or of the single options.

    `others` are options of a schedule that the user has registered.
    """
    method_options = options.method_options | others
    if options.plan is not None:
        require_alone({name: getattr(options, name) for name in ITS_OWN})
        planned = read_plan(options.plan)
        plan = planned.plan
        check_schedule(plan.schedule)
        own = planned.options(method_options)
        return ScheduleChoice(plan.schedule, plan.ranks, plan.microbatches, plan.chunks, own, planned, plan.replicas)
    schedule = "1f1b" if options.schedule is None else options.schedule
    microbatches = options.microbatches
    if microbatches is None:
        microbatches = schedule.shape.microbatches if isinstance(schedule, (Schedule, Loop)) else 4
    replicas = 1 if options.replicas is None else options.replicas
    return ScheduleChoice(schedule, options.stages, microbatches, options.chunks, method_options, replicas=replicas)


def read_schedule(choice: ScheduleChoice, cuts: Sequence[str] | None) -> Schedule | Loop:
    """The schedule by its name, or the user's own if it fits."""
    if isinstance(choice.schedule, (Schedule, Loop)):
        built = choice.schedule
        _require_fit(built, choice)
        if isinstance(built, Schedule) and built.shape.law is not Law.SYNC:
            built = _repeated(built)
    else:
        built = choice.build(_stages(choice.stages, choice.chunks, cuts))
    shape = built.shape
    if isinstance(built, Schedule) and shape.batches != 1:
        raise InputError(
            "a synchronous schedule of one mini-batch, as each ends with an update",
            f"{shape.name!r} of {shape.batches}",
            "give batches=1; it is repeated for every mini-batch",
        )
    if cuts is not None and len(cuts) != shape.stages - 1:
        raise InputError(f"{shape.stages - 1} cuts for {shape.stages} pieces", len(cuts), "name one cut a boundary")
    return built


def require_shards(built: Schedule | Loop) -> None:
    """Refuse a schedule under which replicas cannot divide their state."""
    if isinstance(built, Loop):
        came = f"{built.shape.name}, which updates without one"
        raise InputError("a schedule with a flush where shard divides state", came, "choose one, or leave shard out")
    if max(built.shape.replicas) == 1:
        raise InputError(
            "stages of several replicas where shard divides state",
            "one replica each",
            "add replicas, or leave shard out",
        )


def _repeated(own: Schedule) -> Loop:
    """A user's list without a flush, as a run of any length."""
    prove(own)
    repeating = Loop.repeating(own)
    if own.lowered and lower(repeating.unroll(own.shape.batches)) != own:
        raise InputError(
            "transfers and updates of a schedule without a flush where we put them: around what they serve",
            f"{own.shape.name!r} with others",
            "give its compute actions alone, and let us add the rest",
        )
    return repeating


def with_edges(choice: ScheduleChoice, built: Schedule | Loop, edges: Sequence[tuple[int, int]]) -> Schedule | Loop:
    """The same schedule for a model whose stages send further than to their neighbours."""
    shape = built.shape
    if tuple(edges) == shape.edges:
        return built
    if isinstance(choice.schedule, str):
        return choice.build(shape.ranks, edges)
    if isinstance(built, Loop):
        return replace(built, shape=replace(shape, edges=tuple(edges)))
    return _own_with_edges(built, edges)


def _own_with_edges(own: Schedule, edges: Sequence[tuple[int, int]]) -> Schedule:
    """A user's schedule of compute actions gets the transfers it needs; one that lists its own must list them all."""
    if not own.lowered:
        return replace(own, shape=replace(own.shape, edges=tuple(edges)))
    missing = sorted(set(edges) - set(own.shape.edges))
    if missing:
        raise InputError(
            f"a schedule with transfers from stage {missing[0][0]} to stage {missing[0][1]}, as the model needs them",
            "none",
            "give the compute actions alone, and let us add the transfers",
        )
    return own


def _stages(stages: int | None, chunks: int | None, cuts: Sequence[str] | None) -> int:
    if stages is not None:
        return stages
    if cuts is None:
        raise InputError("stages, cuts or a list of stage modules", "none", "say how the model is to be split")
    return (len(cuts) + 1) // (chunks or 1)


def _require_fit(schedule: Schedule | Loop, choice: ScheduleChoice) -> None:
    shape, stages, microbatches = schedule.shape, choice.stages, choice.microbatches
    if stages is not None and shape.ranks != stages:
        raise InputError(f"a schedule of {stages} stages", shape.ranks, "make stages and schedule agree")
    if shape.microbatches != microbatches:
        raise InputError(f"a schedule of {microbatches} micro-batches", shape.microbatches, "make them agree")
    counts = (choice.replicas,) * shape.ranks if isinstance(choice.replicas, int) else tuple(choice.replicas)
    if choice.replicas != 1 and counts != shape.replicas:
        raise InputError(f"a schedule with replicas {list(counts)}", list(shape.replicas), "leave replicas out")
    if choice.method_options:
        raise InputError(
            "no options for a schedule that is made already", ", ".join(choice.method_options), "leave them out"
        )
