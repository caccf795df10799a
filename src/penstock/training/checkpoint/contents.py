"""What of a pipeline is in a checkpoint, under the model's own names: one rank's share, and the way back.

    model.<name>                a parameter or a buffer
    optimizer.<name>.<key>      a tensor that the optimizer keeps for a parameter
    gradients.<name>            the sum of an accumulation that is not finished
    drift, step                 see drift.py

All else is told in plain values. A weight that several stages use is written by the rank of the stage that owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError
from penstock.training.checkpoint.drift import drift_of, take_drift, wanted_drift
from penstock.training.checkpoint.files import Records
from penstock.training.checkpoint.groups import before, fitting, scheduler_of, settings_of, told_groups
from penstock.training.checkpoint.plain_values import random_states, read, set_random_states, written
from penstock.training.model_state import buffers_of, homes, refuse_extra_state, tied_names
from penstock.training.pipeline_parts import PipelineParts
from penstock.training.weight_files.safetensors import pretrained_files

Tensors = dict[str, torch.Tensor]
Facts = dict[str, Any]


def tensors_of(pipe: PipelineParts) -> Tensors:
    """What this rank has to write: of replicas, which have the same, the first does."""
    refuse_extra_state(pipe.model)
    if pipe.crew.replica:
        return {}
    home, rank, names = homes(pipe.crew, pipe.split), pipe.crew.world.rank, pipe.optimizers.names
    found = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
    found |= {f"model.{name}": buffer for name, buffer in buffers_of(pipe.model) if home[name] == rank}
    for name, key, value in _kept(pipe):
        if isinstance(value, torch.Tensor):
            found[f"optimizer.{name}.{key}"] = value.detach()
    found |= {f"gradients.{names[parameter]}": total for parameter, total in pipe.optimizers.sums.items()}
    return found | drift_of(pipe)


def facts_of(pipe: PipelineParts) -> Facts:
    """What this rank knows; `shared` is the same on all."""
    optimizers, shape = pipe.optimizers, pipe.schedule.shape
    schedulers = optimizers.schedulers or [None] * len(optimizers.optimizers)
    first = pipe.crew.replica == 0  # others would say the same again
    kept: dict[str, dict[str, Any]] = {}
    for name, key, value in _kept(pipe) if first else ():
        plain = not isinstance(value, torch.Tensor)
        kept.setdefault(name, {})[key] = [written(value, f"the optimizer's {key!r} of {name}")] if plain else []
    return {
        "shared": {
            "step": pipe.index,
            "layout": {
                "stages": shape.stages,
                "ranks": pipe.crew.world.size,
                "schedule": shape.name,
                "microbatches": pipe.microbatches,
            },
            "torch": torch.__version__,
            "tied": tied_names(pipe.model),
            "pretrained": pretrained_files(pipe.model),
            "scale": optimizers.scale if optimizers.fp16 else None,
            "good": optimizers.good,
            "since": None if pipe.async_trainer is None else pipe.async_trainer.updates.since,
            "accumulated": {"weight": optimizers.weight, "steps": optimizers.steps, "unit": optimizers.unit},
        },
        "kinds": _kinds(pipe),
        "groups": [
            told
            for optimizer, scheduler in (zip(optimizers.optimizers.values(), schedulers, strict=True) if first else ())
            for told in told_groups(optimizer, scheduler, optimizers.names)
        ],
        "kept": kept,
        "random": random_states(pipe.device),
    }


def merged(parts: list[Facts]) -> Facts:
    """The facts of all ranks as one."""
    return {
        **parts[0]["shared"],
        "optimizer": next((part["kinds"] for part in parts if part["kinds"] is not None), None),
        "groups": [group for part in parts for group in part["groups"]],
        "kept": {name: kept for part in parts for name, kept in part["kept"].items()},
        "random": [part["random"] for part in parts],
    }


class Loading:
    """A checkpoint on its way into a pipeline. Nothing of the pipeline changes before `finish`."""

    def __init__(self, pipe: PipelineParts, facts: Facts, records: Records) -> None:
        self.pipe, self.facts, self.records = pipe, facts, records
        self.step = int(facts["step"])
        self.random = facts["random"]
        self.same_torch = facts["torch"] == torch.__version__
        self.parameters = {name: p for name, p in pipe.model.named_parameters() if not p.is_meta}
        self.buffers = {name: buffer for name, buffer in buffers_of(pipe.model) if not buffer.is_meta}
        self.optimizers: dict[int, Any] = {}
        self.schedulers: list[Any] = []
        self.before: list[Callable[[], None]] = []

    def wanted(self) -> Records:
        """What this rank has to read, when the checkpoint is known to fit."""
        refuse_extra_state(self.pipe.model)
        _require_same_model(self.pipe.model, self.records)
        _require_same_kinds(_kinds(self.pipe), self.facts["optimizer"])
        names = [f"model.{name}" for name in (*self.parameters, *self.buffers)]
        owned = set(self.pipe.optimizers.names.values())
        if self.pipe.optimizers.make is not None:
            names += [f"optimizer.{name}.{key}" for name in owned for key, told in self._kept(name) if not told]
            names += [f"gradients.{name}" for name in owned if f"gradients.{name}" in self.records]
        return {name: self.records[name] for name in names} | wanted_drift(self.pipe, self.records)

    def prepare(self, tensors: Tensors) -> None:
        """Put together what the optimizers will be given."""
        self.tensors = tensors
        parts = self.pipe.optimizers
        for at, optimizer in parts.optimizers.items():
            found = fitting(optimizer, parts.names, self.facts["groups"])
            order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {place: self._state(parts.names[parameter]) for place, parameter in enumerate(order)}
            self.optimizers[at] = {
                "state": {place: kept for place, kept in state.items() if kept},
                "param_groups": settings_of(optimizer, found, self.same_torch),
            }
            if parts.schedulers:
                scheduler = parts.schedulers[len(self.schedulers)]
                self.schedulers.append(scheduler_of(scheduler, found, self.same_torch))

    def take(self) -> None:
        """What optimizers and LR schedulers look at for themselves, and may refuse: `undo` has them as before."""
        parts = self.pipe.optimizers
        self.before = [before(optimizer) for optimizer in parts.optimizers.values()]
        self.before += [before(scheduler) for scheduler in parts.schedulers]
        for at, state in self.optimizers.items():
            parts.fetch(at)  # the state has to be where the weights are when they are updated
            parts.optimizers[at].load_state_dict(state)
        for scheduler, state in zip(parts.schedulers, self.schedulers, strict=True):
            scheduler.load_state_dict(state)

    def undo(self) -> None:
        for restore in self.before:
            restore()

    def finish(self) -> None:
        """The rest, of which nothing can be refused any more."""
        with torch.no_grad():
            for name, mine in (*self.parameters.items(), *self.buffers.items()):
                mine.copy_(self.tensors[f"model.{name}"])
        parts = self.pipe.optimizers
        if parts.make is not None:
            self._take_accumulated()
        take_drift(self.pipe, self.tensors)
        if self.pipe.async_trainer is not None:
            same = self.facts["layout"]["schedule"] == self.pipe.schedule.shape.name
            self.pipe.async_trainer.updates.since = int(self.facts.get("since") or 0) if same else self.step
        self.pipe.index = self.step
        rank = self.pipe.crew.world.rank
        set_random_states(self.random[rank if rank < len(self.random) else 0], self.pipe.device)

    def _take_accumulated(self) -> None:
        parts, told = self.pipe.optimizers, self.facts["accumulated"]
        before = 1.0 if self.facts["scale"] is None else float(self.facts["scale"])
        if parts.fp16 and self.facts["scale"] is not None:
            parts.scale, parts.good = before, int(self.facts["good"])
        parts.weight, parts.steps, parts.unit = float(told["weight"]), int(told["steps"]), float(told["unit"])
        sums = {parameter: self.tensors.get(f"gradients.{name}") for parameter, name in parts.names.items()}
        parts.sums = {
            parameter: total.to(self.pipe.device) * (parts.scale / before)
            for parameter, total in sums.items()
            if total is not None
        }

    def _kept(self, name: str) -> list[tuple[str, list[Any]]]:
        return list(self.facts["kept"].get(name, {}).items())

    def _state(self, name: str) -> dict[str, Any]:
        return {
            key: read(told[0]) if told else self.tensors[f"optimizer.{name}.{key}"] for key, told in self._kept(name)
        }


def _kept(pipe: PipelineParts) -> Iterator[tuple[str, str, Any]]:
    """What the optimizers keep: the parameter's name, the key, the value."""
    for optimizer in pipe.optimizers.optimizers.values():
        for parameter in pipe.optimizers.parameters:
            for key, value in optimizer.state.get(parameter, {}).items():
                yield pipe.optimizers.names[parameter], str(key), value


def _kinds(pipe: PipelineParts) -> Facts | None:
    """Which optimizer and which LR scheduler; None on a rank that has neither."""
    if not pipe.optimizers.optimizers:
        return None
    optimizer = next(iter(pipe.optimizers.optimizers.values()))
    scheduler = next(iter(pipe.optimizers.schedulers), None)
    return {
        "optimizer": type(optimizer).__name__,
        "LR scheduler": None if scheduler is None else type(scheduler).__name__,
    }


def _require_same_model(model: nn.Module, records: Records) -> None:
    """All names and shapes that differ, in one message."""
    mine = {f"model.{name}": t for name, t in (*model.named_parameters(), *buffers_of(model))}
    theirs = {name: record for name, record in records.items() if name.startswith("model.")}
    faults = [f"missing {_short(name)}" for name in mine if name not in theirs]
    faults += [f"unknown {_short(name)}" for name in theirs if name not in mine]
    for name in mine.keys() & theirs.keys():
        here, there = _form(mine[name].dtype, mine[name].shape), _form(theirs[name].dtype, theirs[name].shape)
        if here != there:
            faults.append(f"{_short(name)} of {there}, here {here}")
    if faults:
        raise InputError(
            "a checkpoint of this model", "; ".join(sorted(faults)), "load it into the model it was written from"
        )


def _require_same_kinds(mine: Facts | None, theirs: Facts | None) -> None:
    if mine is None or mine == theirs:
        return  # without an optimizer a pipeline takes the weights alone
    for what, name in mine.items():
        other = None if theirs is None else theirs[what]
        if name != other:
            raise InputError(
                f"a checkpoint written with {what} {name or 'none'}", other or "none", f"use the {what} that it was"
            )


def _short(name: str) -> str:
    return name.removeprefix("model.")


def _form(dtype: torch.dtype | str, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
