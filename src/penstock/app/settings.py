"""What the user asked of a Pipeline, understood: which schedule, which precision, what runs again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from penstock.core.schedule import Schedule
from penstock.core.shape import Law
from penstock.errors import InputError
from penstock.model.stage import Recompute
from penstock.schedules.registry import schedule as build_schedule


def read_schedule(
    asked: str | Schedule, stages: int | None, microbatches: int, chunks: int | None, cuts: Sequence[str] | None
) -> Schedule:
    """The schedule by its name, or the user's own if it fits."""
    if isinstance(asked, Schedule):
        built = asked
        _require_fit(built, stages, microbatches)
    else:
        built = build_schedule(asked, stages=_stages(stages, chunks, cuts), microbatches=microbatches, chunks=chunks)
    shape = built.shape
    if shape.law is not Law.SYNC or shape.batches != 1 or shape.slots != shape.ranks:
        raise InputError(
            "a synchronous schedule of one mini-batch without replicas", repr(shape.name), "choose a synchronous method"
        )
    if cuts is not None and len(cuts) != shape.stages - 1:
        raise InputError(f"{shape.stages - 1} cuts for {shape.stages} pieces", len(cuts), "name one cut a boundary")
    return built


def with_edges(
    asked: str | Schedule, built: Schedule, edges: Sequence[tuple[int, int]], chunks: int | None
) -> Schedule:
    """The same named schedule for a model whose stages send further than to their neighbours."""
    shape = built.shape
    if isinstance(asked, Schedule) or tuple(edges) == shape.edges:
        return built
    return build_schedule(asked, stages=shape.ranks, microbatches=shape.microbatches, chunks=chunks, edges=edges)


def _stages(stages: int | None, chunks: int | None, cuts: Sequence[str] | None) -> int:
    if stages is not None:
        return stages
    if cuts is None:
        raise InputError("stages, cuts or a list of stage modules", "none", "say how the model is to be split")
    return (len(cuts) + 1) // (chunks or 1)


def _require_fit(schedule: Schedule, stages: int | None, microbatches: int) -> None:
    shape = schedule.shape
    if stages is not None and shape.ranks != stages:
        raise InputError(f"a schedule of {stages} stages", shape.ranks, "make stages and schedule agree")
    if shape.microbatches != microbatches:
        raise InputError(f"a schedule of {microbatches} micro-batches", shape.microbatches, "make them agree")


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
