"""Train entries as pipelines beside plain training, and write down how far the weights are from each other.

Run as a script, by one process or by every rank: python train.py WAY SCHEDULES ENTRIES FILE.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from build import PARTS, Case, build
from torch import Tensor, nn

import penstock
from penstock.errors import PenstockError

CLOSE = 1e-10
RATE = 1e-3


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
        if name in some and tensor.numel():
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
    """A model of the net, and plain training's weights when they are asked for."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(7)
        self.case = build(name)
        self.start = _state(self.case.model)
        self.wholes: dict[str, Tensor] | None = None
        self.parts: dict[str, Tensor] | None = None

    def whole(self) -> dict[str, Tensor]:
        if self.wholes is None:
            self.wholes = plain(self.case, 1)
        return self.wholes

    def in_parts(self) -> dict[str, Tensor]:
        if self.parts is None:
            self.parts = plain(self.case, PARTS)
        return self.parts

    def result(self, schedule: str) -> dict[str, Any]:
        try:
            weights = piped(self.case, schedule)
        except PenstockError as error:
            return {"outcome": "refused", "said": f"{type(error).__name__}: {error}"}
        except Exception as error:
            return {"outcome": "failed", "said": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
        off, name = distance(weights, self.whole())
        result: dict[str, Any] = {"outcome": "exact", "off": off, "farthest": name, "against": "whole batches"}
        if not off <= CLOSE:
            off, name = distance(weights, self.in_parts())
            result |= {"off": off, "farthest": name, "against": "micro-batches", "whole": result["off"]}
            result["whole farthest"] = result["farthest"]
            result["farthest"] = name
        if not result["off"] <= CLOSE:
            result["outcome"] = "wrong"
        result["moved"] = distance(self.whole(), self.start)[0]
        return result


def main(way: str, schedules: str, entries: str, file: str) -> None:
    import os

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    rank = int(os.environ.get("RANK", "0"))
    warnings.simplefilter("ignore")
    out = Path(f"{file}.{rank}").open("a")

    def write(**record: Any) -> None:
        out.write(json.dumps(record) + "\n")
        out.flush()

    for name in entries.split(";"):
        write(begun=name)
        began = time.perf_counter()
        try:
            entry = Entry(name)
            if not all(bool(tensor.isfinite().all()) for tensor in entry.whole().values()):
                raise ValueError("plain training gives weights that are not finite")
        except Exception as error:
            write(entry=name, outcome="not tried", said=f"{type(error).__name__}: {error}", trace=traceback.format_exc()[-3000:])
            continue
        for schedule in schedules.split(","):
            result = entry.result(schedule)
            write(entry=name, way=way, schedule=schedule, seconds=round(time.perf_counter() - began, 2), **result)
            began = time.perf_counter()
        del entry
        gc.collect()
    write(ended=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
