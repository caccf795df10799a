"""Checks of single options, and what the names in them stand for."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.core.loop import Loop
from penstock.core.schedule import Schedule
from penstock.errors import InputError
from penstock.model.stage import Recompute
from penstock.training.sharded_state import Shard

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def read_recompute(name: str) -> Recompute:
    try:
        return Recompute(name)
    except ValueError:
        names = ", ".join(member.value for member in Recompute)
        raise InputError(f"recompute to be one of {names}", repr(name), "choose one") from None


def check_loss(loss: Any) -> None:
    """Refuse a loss that is no function, or that has weights nobody would train."""
    if loss is not None and not callable(loss):
        raise InputError("loss= to be a function", type(loss).__name__, "give loss=lambda result, target: ...")
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise InputError(
            "a loss without parameters of its own, as no stage owns them",
            f"{type(loss).__name__} with some that require grad",
            "make it part of the model, whose forward then returns the loss",
        )


def check_model(model: Any) -> None:
    modules = [model] if isinstance(model, nn.Module) else model
    if not isinstance(modules, (list, tuple, nn.ModuleList)) or not all(isinstance(m, nn.Module) for m in modules):
        raise InputError("an nn.Module, or a list of stage modules", repr(model)[:60], "give the model first")
    for module in modules:
        _require_bare(module)


def check_replicas(replicas: Any) -> None:
    counts = list(replicas) if isinstance(replicas, (list, tuple)) else [replicas]
    if replicas is not None and not (counts and all(type(count) is int and count > 0 for count in counts)):
        raise InputError(
            "replicas to be a positive number, or one for each pipeline rank",
            repr(replicas),
            "write replicas=2, or replicas=[2, 1]",
        )


def check_shard(shard: Any) -> None:
    if shard is not None and shard not in list(Shard):
        names = " or ".join(repr(level.value) for level in Shard)
        raise InputError(f"shard to be {names}", repr(shard), "choose one, or leave it out")


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def _require_bare(model: nn.Module) -> None:
    """Refuse a model that another library has spread over processes. By name: importing them all takes long."""
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


def check_example(example: Any) -> None:
    if example is None:
        raise InputError("example= to be a small batch of the model's inputs", None, "give one, as forward takes it")


def check_schedule(schedule: Any) -> None:
    if schedule is not None and not isinstance(schedule, (str, Schedule, Loop)):
        raise InputError("schedule= to be a name, or a schedule", repr(schedule)[:60], 'write schedule="1f1b", say')


def check_cuts(cuts: Any) -> None:
    if cuts is not None and (isinstance(cuts, str) or not all(isinstance(c, str) for c in cuts)):
        raise InputError("cuts to be a list of module names", repr(cuts), 'write cuts=["blocks.4"]')


def check_precision(name: Any) -> None:
    if name is not None and name not in PRECISIONS:
        raise InputError("precision to be bf16 or fp16", repr(name), "choose one, or leave it out")


def check_clip(clip: Any) -> None:
    if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
        raise InputError("clip to be a positive norm", clip, "correct clip or leave it out")


def check_accumulate(accumulate: Any) -> None:
    if not isinstance(accumulate, int) or accumulate < 1:
        raise InputError("accumulate to be at least 1 step", accumulate, "correct accumulate")


def check_lr_scheduler(make: Any) -> None:
    if make is not None and not callable(make):
        raise InputError("lr_scheduler= to be a function", type(make).__name__, "give lambda optimizer: ...")


def check_seed(seed: Any) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise InputError("seed to be a whole number", repr(seed), "give one")


def check_data(data: Any) -> None:
    if data not in ("every", "rank0"):
        raise InputError("data to be 'every' (rank has it) or 'rank0'", repr(data), "choose one")


def check_timeout(timeout: Any) -> None:
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise InputError("timeout to be a positive number of seconds", repr(timeout), "correct it")


def check_load(load: Any) -> None:
    if load is not None and not callable(load) and not isinstance(load, (str, os.PathLike)):
        do = "give load=state.__getitem__ for a state dict"
        raise InputError("load= to be a function of a parameter's name", type(load).__name__, do)


def autocast_of(precision: str | None, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes the context in which forwards of a precision run."""
    check_precision(precision)
    return nullcontext if precision is None else partial(torch.autocast, device.type, dtype=PRECISIONS[precision])


def home_of(model: nn.Module) -> torch.device:
    """Return the one device that a model's parameters are on."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise InputError(
            "a model on one device",
            ", ".join(sorted(map(str, devices))),
            "move it with .to(device) and let us place it",
        )
    return devices.pop() if devices else torch.get_default_device()
