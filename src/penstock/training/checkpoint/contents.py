"""Contents of a checkpoint under the model's own names: one rank's share, and loading it again.

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
from penstock.training.checkpoint.drift import drift_of, needed_drift, take_drift
from penstock.training.checkpoint.files import Records
from penstock.training.checkpoint.groups import before, fitting, group_facts, scheduler_of, settings_of
from penstock.training.checkpoint.plain_values import random_states, read, set_random_states, written
from penstock.training.model_state import buffers_of, homes, refuse_extra_state, tied_names
from penstock.training.pipeline_parts import PipelineParts
from penstock.training.sharded_state import ShardedState
from penstock.training.weight_files.safetensors import pretrained_files

Tensors = dict[str, torch.Tensor]
Facts = dict[str, Any]


def tensors_of(pipe: PipelineParts) -> Tensors:
    """Return the tensors that this rank writes: of the replicas of a stage, which hold the same, the first writes."""
    refuse_extra_state(pipe.model)
    home, rank, names = homes(pipe.ranks, pipe.split), pipe.ranks.world.rank, pipe.optimizers.names
    sharded = pipe.optimizers.sharded
    whole = {} if sharded is None else sharded.whole
    tensors = {f"model.{name}": whole.get(parameter, parameter).detach() for parameter, name in names.items()}
    tensors |= {f"model.{name}": buffer for name, buffer in buffers_of(pipe.model) if home[name] == rank}
    for name, key, value in _kept(pipe, whole=True):
        if isinstance(value, torch.Tensor):
            tensors[f"optimizer.{name}.{key}"] = value.detach()
    for parameter, total in pipe.optimizers.sums.items():
        tensors[f"gradients.{names[parameter]}"] = _whole(sharded, parameter, total)
    return tensors | drift_of(pipe) if not pipe.ranks.replica else {}


def facts_of(pipe: PipelineParts) -> Facts:
    """Return this rank's facts as plain values; `shared` is the same on all ranks."""
    optimizers, shape = pipe.optimizers, pipe.schedule.shape
    schedulers = optimizers.schedulers or [None] * len(optimizers.optimizers)
    kept: dict[str, dict[str, Any]] = {}
    first = not pipe.ranks.replica
    for name, key, value in _kept(pipe) if first else ():
        plain = not isinstance(value, torch.Tensor)
        kept.setdefault(name, {})[key] = [written(value, f"the optimizer's {key!r} of {name}")] if plain else []
    return {
        "shared": {
            "step": pipe.index,
            "layout": {
                "stages": shape.stages,
                "ranks": pipe.ranks.world.size,
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
            group
            for optimizer, scheduler in zip(optimizers.optimizers.values(), schedulers, strict=True)
            if first
            for group in group_facts(optimizer, scheduler, optimizers.names)
        ],
        "kept": kept,
        "random": random_states(pipe.device),
    }


def merged(parts: list[Facts]) -> Facts:
    """Return the facts of all ranks as one table."""
    return {
        **parts[0]["shared"],
        "optimizer": next((part["kinds"] for part in parts if part["kinds"] is not None), None),
        "groups": [group for part in parts for group in part["groups"]],
        "kept": {name: kept for part in parts for name, kept in part["kept"].items()},
        "random": [part["random"] for part in parts],
    }


class Loading:
    """Loads a checkpoint into a pipeline, which does not change before `finish`."""

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

    def needed(self) -> Records:
        """Return the records that this rank reads; raise for a checkpoint that does not fit."""
        refuse_extra_state(self.pipe.model)
        _require_same_model(self.pipe.model, self.records)
        _require_same_kinds(_kinds(self.pipe), self.facts["optimizer"])
        names = [f"model.{name}" for name in (*self.parameters, *self.buffers)]
        owned = set(self.pipe.optimizers.names.values())
        if self.pipe.optimizers.make is not None:
            names += [f"optimizer.{name}.{key}" for name in owned for key, plain in self._kept(name) if not plain]
            names += [f"gradients.{name}" for name in owned if f"gradients.{name}" in self.records]
        return {name: self.records[name] for name in names} | needed_drift(self.pipe, self.records)

    def prepare(self, tensors: Tensors) -> None:
        """Assemble the states that the optimizers and LR schedulers will load."""
        self.tensors = tensors
        parts = self.pipe.optimizers
        for at, optimizer in parts.optimizers.items():
            groups = fitting(optimizer, parts.names, self.facts["groups"])
            order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {place: self._state(parameter) for place, parameter in enumerate(order)}
            self.optimizers[at] = {
                "state": {place: kept for place, kept in state.items() if kept},
                "param_groups": settings_of(optimizer, groups, self.same_torch),
            }
            if parts.schedulers:
                scheduler = parts.schedulers[len(self.schedulers)]
                self.schedulers.append(scheduler_of(scheduler, groups, self.same_torch))

    def take(self) -> None:
        """Load the states of optimizers and LR schedulers, which may refuse them; `undo` restores the old ones."""
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
        """Load everything else, which cannot be refused any more."""
        with torch.no_grad():
            for name, tensor in (*self.parameters.items(), *self.buffers.items()):
                tensor.copy_(self.tensors[f"model.{name}"])
        parts = self.pipe.optimizers
        if parts.make is not None:
            self._take_accumulated()
        take_drift(self.pipe, self.tensors)
        if self.pipe.async_trainer is not None:
            same = self.facts["layout"]["schedule"] == self.pipe.schedule.shape.name
            self.pipe.async_trainer.updates.since = int(self.facts.get("since") or 0) if same else self.step
        self.pipe.index = self.step
        rank = self.pipe.ranks.world.rank
        set_random_states(self.random[rank if rank < len(self.random) else 0], self.pipe.device)

    def _take_accumulated(self) -> None:
        parts, accumulated = self.pipe.optimizers, self.facts["accumulated"]
        before = 1.0 if self.facts["scale"] is None else float(self.facts["scale"])
        if parts.fp16 and self.facts["scale"] is not None:
            parts.scale, parts.good = before, int(self.facts["good"])
        parts.weight, parts.steps, parts.unit = (
            float(accumulated["weight"]),
            int(accumulated["steps"]),
            float(accumulated["unit"]),
        )
        sums = {parameter: self.tensors.get(f"gradients.{name}") for parameter, name in parts.names.items()}
        parts.sums = {
            parameter: self._own(parameter, total).to(self.pipe.device) * (parts.scale / before)
            for parameter, total in sums.items()
            if total is not None
        }

    def _kept(self, name: str) -> list[tuple[str, list[Any]]]:
        return list(self.facts["kept"].get(name, {}).items())

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        name = self.pipe.optimizers.names[parameter]
        return {
            key: read(plain[0]) if plain else self._own(parameter, self.tensors[f"optimizer.{name}.{key}"])
            for key, plain in self._kept(name)
        }

    def _own(self, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """Return what is kept for a parameter, or for this replica's rows of it."""
        sharded = self.pipe.optimizers.sharded
        return value if sharded is None or parameter not in sharded.whole else sharded.state_part(parameter, value)


def _kept(pipe: PipelineParts, whole: bool = False) -> Iterator[tuple[str, str, Any]]:
    """Yield the state of the optimizers: a parameter's name, a key, and its value; with `whole`, that of
    all replicas together, for which each has to ask."""
    sharded = pipe.optimizers.sharded
    for optimizer in pipe.optimizers.optimizers.values():
        for parameter in pipe.optimizers.parameters:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensor = whole and isinstance(value, torch.Tensor)
                kept = _whole(sharded, parameter, value) if tensor else value
                yield pipe.optimizers.names[parameter], str(key), kept


def _whole(sharded: ShardedState | None, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """Return what is kept for a parameter; where each replica has some rows of it, all together."""
    return value if sharded is None or parameter not in sharded.whole else sharded.state_whole(parameter, value)


def _kinds(pipe: PipelineParts) -> Facts | None:
    """Return the class names of optimizer and LR scheduler, or None on a rank without them."""
    if not pipe.optimizers.optimizers:
        return None
    optimizer = next(iter(pipe.optimizers.optimizers.values()))
    scheduler = next(iter(pipe.optimizers.schedulers), None)
    return {
        "optimizer": type(optimizer).__name__,
        "LR scheduler": None if scheduler is None else type(scheduler).__name__,
    }


def _require_same_model(model: nn.Module, records: Records) -> None:
    """Raise one error with all names and shapes that differ."""
    ours = {f"model.{name}": t for name, t in (*model.named_parameters(), *buffers_of(model))}
    theirs = {name: record for name, record in records.items() if name.startswith("model.")}
    faults = [f"missing {_short(name)}" for name in ours if name not in theirs]
    faults += [f"unknown {_short(name)}" for name in theirs if name not in ours]
    for name in ours.keys() & theirs.keys():
        here, there = _form(ours[name].dtype, ours[name].shape), _form(theirs[name].dtype, theirs[name].shape)
        if here != there:
            faults.append(f"{_short(name)} of {there}, here {here}")
    if faults:
        raise InputError(
            "a checkpoint of this model", "; ".join(sorted(faults)), "load it into the model it was written from"
        )


def _require_same_kinds(ours: Facts | None, theirs: Facts | None) -> None:
    if ours is None or ours == theirs:
        return  # without an optimizer a pipeline takes the weights alone
    for what, name in ours.items():
        other = None if theirs is None else theirs[what]
        if name != other:
            raise InputError(
                f"a checkpoint written with {what} {name or 'none'}", other or "none", f"use the {what} that it was"
            )


def _short(name: str) -> str:
    return name.removeprefix("model.")


def _form(dtype: torch.dtype | str, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
