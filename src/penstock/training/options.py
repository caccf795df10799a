"""What the user asked of a Pipeline, understood: which schedule, which precision, what runs again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from penstock.core.check import prove
from penstock.core.loop import Loop
from penstock.core.lower import lower
from penstock.core.schedule import Schedule
from penstock.core.shape import Law
from penstock.errors import InputError
from penstock.model.stage import Recompute
from penstock.schedules.registry import find
from penstock.schedules.registry import loop as build_loop
from penstock.schedules.registry import schedule as build_schedule
from penstock.training.plan_options import Planned, read_plan, require_alone


@dataclass(frozen=True)
class Wanted:
    """What was asked of a Pipeline, as it was asked; see there."""

    model: nn.Module | Sequence[nn.Module]
    example: Any
    stages: int | None
    schedule: str | Schedule | Loop
    microbatches: int
    optimizer: Callable[..., torch.optim.Optimizer] | None
    cuts: Sequence[str] | None
    chunks: int | None
    recompute: str
    offload: bool | str
    precision: str | None
    clip: float | None
    accumulate: int
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None
    seed: int
    verify: bool
    data: str
    transport: str | None
    timeout: float
    timeline: bool
    load: Callable[[str], torch.Tensor] | None
    options: dict[str, Any] = field(default_factory=dict)  # of the schedule's method
    plan: Planned | None = None
    replicas: int | Sequence[int] = 1

    def __post_init__(self) -> None:
        """Refuse what is of the wrong kind altogether; what it means is looked at where it is used."""
        modules = [self.model] if isinstance(self.model, nn.Module) else self.model
        if not isinstance(modules, (list, tuple, nn.ModuleList)) or not all(isinstance(m, nn.Module) for m in modules):
            raise InputError("an nn.Module, or a list of stage modules", repr(self.model)[:60], "give the model first")
        for module in modules:
            _require_bare(module)
        if not isinstance(self.model, nn.Module):
            self._require_stages(list(modules))
            self._require_no_plan()
        if self.example is None:
            raise InputError(
                "example= to be a small batch of the model's inputs", None, "give one, as forward takes it"
            )
        if not isinstance(self.schedule, (str, Schedule, Loop)):
            raise InputError(
                "schedule= to be a name, or a schedule", repr(self.schedule)[:60], 'write schedule="1f1b", say'
            )
        if self.cuts is not None and (isinstance(self.cuts, str) or not all(isinstance(c, str) for c in self.cuts)):
            raise InputError("cuts to be a list of module names", repr(self.cuts), 'write cuts=["blocks.4"]')
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise InputError("seed to be a whole number", repr(self.seed), "give one")
        if self.load is not None and not callable(self.load):
            raise InputError(
                "load= to be a function of a parameter's name",
                type(self.load).__name__,
                "give load=state.__getitem__ for a state dict",
            )
        if self.lr_scheduler is not None and not callable(self.lr_scheduler):
            raise InputError(
                "lr_scheduler= to be a function", type(self.lr_scheduler).__name__, "give lambda optimizer: ..."
            )
        if self.lr_scheduler is not None and self.optimizer is None:
            raise InputError("an optimizer for the lr_scheduler", "none", "give optimizer= too")
        if not isinstance(self.timeout, (int, float)) or not self.timeout > 0:
            raise InputError("timeout to be a positive number of seconds", repr(self.timeout), "correct it")

    def _require_no_plan(self) -> None:
        if self.plan is not None:
            raise InputError("one model for a plan, which cuts it", "a list of stage modules", "leave out either")

    def _require_stages(self, modules: list[nn.Module]) -> None:
        if len(set(map(id, modules))) < len(modules) or not modules:
            raise InputError(
                "stage modules, each once", f"{len(modules)}, some of them twice", "copy it, or put both uses in one"
            )
        ranks = len(modules) // (self.chunks or 1)
        if self.stages is not None and self.stages != ranks:
            raise InputError(
                f"stages={ranks} for a list of {len(modules)} stage modules", self.stages, "leave stages out"
            )


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def _require_bare(model: nn.Module) -> None:
    """Refuse what others have spread over processes or devices already. By name: to import them all takes long."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith(("torch.", "deepspeed."))}
        wrapper = next((kind for kind in _WRAPPERS if kind in kinds), None)
        if wrapper is not None:
            inner = f"the model's {name!r}" if name else "the model"
            wraps = wrapper != "FSDPModule"
            raise InputError(
                "the bare model, as the Pipeline itself spreads it over ranks and joins their gradients",
                f"{wrapper} around {inner}" if wraps else f"{inner} after fully_shard",
                "give what it wraps, its .module" if wraps else "give it as it was before fully_shard",
            )


@dataclass(frozen=True)
class Course:
    """How the model is to be trained, whether a plan says so or the user himself."""

    stages: int | None
    schedule: str | Schedule | Loop
    microbatches: int
    chunks: int | None
    options: dict[str, Any]
    plan: Planned | None = None
    replicas: int | Sequence[int] = 1


def read_course(plan: object, given: dict[str, Any], options: dict[str, Any]) -> Course:
    """By the plan, which stands alone; or by what is given, None where it is not."""
    if plan is not None:
        require_alone(given)
        found = read_plan(plan)
        its = found.plan
        return Course(
            its.ranks, its.schedule, its.microbatches, its.chunks, found.options(options), found, its.replicas
        )
    schedule, microbatches = given["schedule"], given["microbatches"]
    return Course(
        given["stages"],
        "1f1b" if schedule is None else schedule,
        _microbatches(schedule) if microbatches is None else microbatches,
        given["chunks"],
        options,
        replicas=1 if given["replicas"] is None else given["replicas"],
    )


def _microbatches(schedule: object) -> int:
    """The number where none is given: a schedule's own."""
    return schedule.shape.microbatches if isinstance(schedule, (Schedule, Loop)) else 4


def require_plain_loss(loss: Any) -> None:
    """Refuse a loss that is no function, or that has weights nobody would train."""
    if loss is not None and not callable(loss):
        raise InputError("loss= to be a function", type(loss).__name__, "give loss=lambda result, target: ...")
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise InputError(
            "a loss without parameters of its own, as no stage owns them",
            f"{type(loss).__name__} with some that require grad",
            "make it part of the model, whose forward then returns the loss",
        )


@dataclass(frozen=True)
class Asked:
    """Which schedule: by name with its method's options, or the user's own."""

    schedule: str | Schedule | Loop
    stages: int | None
    microbatches: int
    chunks: int | None
    options: dict[str, Any]
    replicas: int | Sequence[int] = 1

    def named(self, stages: int, edges: Sequence[tuple[int, int]] = ()) -> Schedule | Loop:
        assert isinstance(self.schedule, str)
        given: dict[str, Any] = {
            "stages": stages, "microbatches": self.microbatches, "edges": edges,
            "replicas": self.replicas, **self.options,
        }  # fmt: skip
        if find(self.schedule).asynchronous:
            if self.chunks not in (None, 1):
                raise InputError(f"one chunk a rank for {self.schedule}", self.chunks, "leave chunks out")
            return build_loop(self.schedule, **given)
        # The user's number of stages decides how many pieces the model is cut into, not a search for the best one.
        chunks = 1 if self.chunks is None and self.schedule == "auto" else self.chunks
        return build_schedule(self.schedule, chunks=chunks, **given)


def read_schedule(asked: Asked, cuts: Sequence[str] | None) -> Schedule | Loop:
    """The schedule by its name, or the user's own if it fits."""
    if isinstance(asked.schedule, (Schedule, Loop)):
        built = asked.schedule
        _require_fit(built, asked)
        if isinstance(built, Schedule) and built.shape.law is not Law.SYNC:
            built = _repeated(built)
    else:
        built = asked.named(_stages(asked.stages, asked.chunks, cuts))
    shape = built.shape
    if isinstance(built, Schedule) and shape.batches != 1:
        raise InputError(
            "a synchronous schedule of one mini-batch, as each ends with an update",
            f"{shape.name!r} of {shape.batches}",
            "give batches=1; it is repeated for every mini-batch",
        )
    if shape.slots != shape.ranks and not isinstance(built, Schedule):
        raise InputError(
            "a synchronous schedule for stages with replicas", repr(shape.name), "choose one, or leave replicas out"
        )
    if cuts is not None and len(cuts) != shape.stages - 1:
        raise InputError(f"{shape.stages - 1} cuts for {shape.stages} pieces", len(cuts), "name one cut a boundary")
    return built


def _repeated(own: Schedule) -> Loop:
    """A user's list without a flush, as a run of any length."""
    prove(own)
    found = Loop.repeating(own)
    if own.lowered and lower(found.unroll(own.shape.batches)) != own:
        raise InputError(
            "transfers and updates of a schedule without a flush where we put them: around what they serve",
            f"{own.shape.name!r} with others",
            "give its compute actions alone, and let us add the rest",
        )
    return found


def with_edges(asked: Asked, built: Schedule | Loop, edges: Sequence[tuple[int, int]]) -> Schedule | Loop:
    """The same schedule for a model whose stages send further than to their neighbours."""
    shape = built.shape
    if tuple(edges) == shape.edges:
        return built
    if isinstance(asked.schedule, str):
        return asked.named(shape.ranks, edges)
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


def _require_fit(schedule: Schedule | Loop, asked: Asked) -> None:
    shape, stages, microbatches = schedule.shape, asked.stages, asked.microbatches
    if stages is not None and shape.ranks != stages:
        raise InputError(f"a schedule of {stages} stages", shape.ranks, "make stages and schedule agree")
    if shape.microbatches != microbatches:
        raise InputError(f"a schedule of {microbatches} micro-batches", shape.microbatches, "make them agree")
    counts = asked.replicas if isinstance(asked.replicas, (list, tuple)) else (asked.replicas,) * shape.ranks
    if asked.replicas != 1 and tuple(counts) != shape.replicas:
        raise InputError(
            f"a schedule with {list(counts)} replicas",
            list(shape.replicas),
            "give replicas where you make the schedule",
        )
    if asked.options:
        raise InputError("no options for a schedule that is made already", ", ".join(asked.options), "leave them out")


def read_recompute(asked: str) -> Recompute:
    try:
        return Recompute(asked)
    except ValueError:
        names = ", ".join(member.value for member in Recompute)
        raise InputError(f"recompute to be one of {names}", repr(asked), "choose one") from None


def read_precision(asked: str | None, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A maker of the context that forwards run in."""
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if asked is None:
        return nullcontext
    if asked not in kinds:
        raise InputError("precision to be bf16 or fp16", repr(asked), "choose one, or leave it out")
    return lambda: torch.autocast(device.type, dtype=kinds[asked])


def home_of(model: nn.Module) -> torch.device:
    """The one device that a model's parameters are on."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise InputError(
            "a model on one device",
            ", ".join(sorted(map(str, devices))),
            "move it with .to(device) and let us place it",
        )
    return devices.pop() if devices else torch.get_default_device()
