"""Train entries as pipelines beside plain training, and write down how far the weights are from each other.

Run as a script, by one process or by every rank: python train.py SCHEDULES ENTRIES FILE.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import time
import traceback
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from build import PARTS, Case, build
from torch import Tensor, nn

import penstock
from penstock.errors import PenstockError

NEAR = 1e-10
CLOSE = {torch.float64: 1e-8, torch.float32: 1e-6}  # AdamW enlarges rounding where gradients are nearly nothing
RATE = 1e-3
RANK = int(os.environ.get("RANK", "0"))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def plain(case: Case, parts: int) -> dict[str, Tensor]:
    """Weights after plain training, by whole batches or in micro-batches of equal rows."""
    model = copy.deepcopy(case.model)
    taken = optimizer(model.parameters())
    for inputs, target in case.batches:
        taken.zero_grad()
        norms = Norms(model)
        for rows in torch.arange(len(target)).chunk(parts):
            part = target[rows]
            (case.loss(_called(model, inputs, rows), part) * (case.mean(part) if parts > 1 else 1.0)).backward()
        if parts > 1:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= case.mean(target)
        norms.end()
        taken.step()
    return _state(model)


class Norms:
    """Running averages of batch norms move once a step, by all micro-batches together."""

    def __init__(self, model: nn.Module) -> None:
        self.given: dict[nn.Module, list[Tensor]] = {}
        self.all = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        self.before = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in self.all]
        self.hooks = [norm.register_forward_pre_hook(self._note) for norm in self.all]

    def _note(self, norm: nn.Module, inputs: tuple[Tensor]) -> None:
        self.given.setdefault(norm, []).append(inputs[0].detach().clone())

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()
        with torch.no_grad():
            for norm, before in zip(self.all, self.before, strict=True):
                norm.load_state_dict(before, strict=False)
                if norm in self.given:
                    norm(torch.cat(self.given[norm]))


def _called(model: nn.Module, inputs: Any, rows: Tensor) -> Any:
    if isinstance(inputs, Tensor):
        return model(inputs[rows])
    return model(**{name: value[rows] if isinstance(value, Tensor) else value for name, value in inputs.items()})


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def distance(some: dict[str, Tensor], others: dict[str, Tensor]) -> tuple[float, str]:
    """The largest, and whose."""
    farthest = (0.0, "")
    for name, tensor in others.items():
        if tensor.numel() and "num_batches" not in name:
            off = float((some[name].double() - tensor.double()).abs().max())
            if not off <= farthest[0]:
                farthest = (off, name)
    return farthest


def piped(case: Case, schedule: str) -> dict[str, Tensor]:
    pipe = penstock.Pipeline(
        copy.deepcopy(case.model), example=case.batches[0][0], stages=2, schedule=schedule, microbatches=PARTS,
        loss=case.loss, optimizer=optimizer, timeout=40,
    )  # fmt: skip
    try:
        for inputs, target in case.batches:
            pipe.step(inputs, target)
        return pipe.state_dict()
    finally:
        pipe.close()


class Entry:
    """A model of the net, and plain training's weights."""

    def __init__(self, name: str) -> None:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(7)
        self.case = build(name)
        self.start = _state(self.case.model)

    def require_finite(self) -> None:
        if not all(bool(tensor.isfinite().all()) for tensor in self.whole.values()):
            raise ValueError("plain training gives weights that are not finite")

    @cached_property
    def whole(self) -> dict[str, Tensor]:
        return plain(self.case, 1)

    @cached_property
    def in_parts(self) -> dict[str, Tensor]:
        return plain(self.case, PARTS)

    def result(self, schedule: str) -> dict[str, Any]:
        """What came of training it by this schedule."""
        try:
            weights = piped(self.case, schedule)
        except PenstockError as error:
            return {"outcome": "refused", "said": f"{type(error).__name__}: {error}"}
        except Exception as error:
            return {"outcome": "failed", **_said(error)}
        return self.compared(weights) if RANK == 0 else {}

    def compared(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """How far weights are from plain training's: by whole batches, or else by their micro-batches."""
        moved, (off, name) = distance(self.whole, self.start)[0], distance(weights, self.whole)
        against, close = "whole batches", CLOSE[torch.get_default_dtype()]
        if not off <= NEAR:
            (off, name), against = distance(weights, self.in_parts), "micro-batches"
        outcome = "exact" if off <= close and moved > RATE else "wrong"
        return {"outcome": outcome, "off": off, "farthest": name, "against": against, "moved": moved}


def _said(error: Exception) -> dict[str, str]:
    return {"said": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}


def main(schedules: str, entries: str, file: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in entries.split(";"):
        began = time.perf_counter()
        try:
            entry = Entry(name)
            if "RANK" not in os.environ:  # ranks are given what is trained inline
                entry.require_finite()
        except Exception as error:
            for schedule in schedules.split(","):
                write(file, entry=name, schedule=schedule, outcome="not tried", **_said(error))
            continue
        for schedule in schedules.split(","):
            result = entry.result(schedule)
            write(file, entry=name, schedule=schedule, seconds=round(time.perf_counter() - began, 2), **result)
            began = time.perf_counter()
        del entry
        gc.collect()


def write(file: str, **record: Any) -> None:
    """Rank 0 writes for all."""
    if RANK == 0:
        with Path(file).open("a") as out:
            out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
