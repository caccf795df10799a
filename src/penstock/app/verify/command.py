"""`penstock verify`: train some steps as a pipeline and in one plain process, and say how far they are apart.

Every rank trains the plain copy too and compares the stages that are its own. Distances of gradients and weights are
the largest of every stage, relative to each tensor's norm.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from penstock.app.config.task import Task
from penstock.app.run.plain import Plain
from penstock.app.run.request import Request, as_worker, rank
from penstock.errors import InputError
from penstock.schedules.registry import find

FLOOR = 1e-3  # of the largest tensor's norm: what is smaller is measured by this, lest rounding alone look large


@dataclass
class Distance:
    """The worst of many tensors: a number's largest difference, a tensor's in parts of its norm, and its name."""

    absolute: float = 0.0
    relative: float = 0.0
    name: str = ""

    def meet(self, other: Distance) -> None:
        """Keep the worse; a distance that is no number is the worst."""
        if other.relative > self.relative or other.relative != other.relative:
            self.relative, self.name = other.relative, other.name
        self.absolute = max(self.absolute, other.absolute)


@dataclass
class StageDistance:
    """Of one stage, over all steps."""

    stage: int
    tensors: int = 0
    gradient: Distance = field(default_factory=Distance)
    weight: Distance = field(default_factory=Distance)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StageDistance:
        return cls(data["stage"], data["tensors"], Distance(**data["gradient"]), Distance(**data["weight"]))


class Recorder:
    """Makes a pipeline's optimizers, and sees the gradients they are given, by the model's own names."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.make = make
        self.weights: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def optimizer(self, names: list[str], params: list[Tensor]) -> torch.optim.Optimizer:
        made = self.make(names, params)
        mine = dict(zip(names, params, strict=True))
        self.weights |= mine

        def look(*_: Any) -> None:
            self.gradients |= {name: p.grad.detach().clone() for name, p in mine.items() if p.grad is not None}

        made.register_step_pre_hook(look)
        return made


def distances(found: dict[str, Tensor], wanted: dict[str, Tensor], largest: float) -> dict[str, Distance]:
    """Of every tensor that either has; one that only one of them has is infinitely far."""
    every = {}
    for name in found.keys() | wanted.keys():
        if name not in found or name not in wanted:
            every[name] = Distance(float("inf"), float("inf"), name)
            continue
        off = (found[name].detach() - wanted[name].detach()).double()
        scale = max(wanted[name].double().norm().item(), FLOOR * largest, 1e-300)
        every[name] = Distance(off.abs().max().item() if off.numel() else 0.0, off.norm().item() / scale, name)
    return every


def largest_norm(tensors: dict[str, Tensor]) -> float:
    return max((tensor.detach().double().norm().item() for tensor in tensors.values()), default=0.0)


# Of each tensor's norm. In single precision rounding grows: AdamW's first steps are as long for a gradient that is all
# rounding as for any other. In double nothing but a fault comes near the bound.
TOLERANCE = {"double": 1e-9, "float32": 1e-5, "bf16": 1e-2}


@dataclass(frozen=True)
class Verdict:
    """What was found over some steps: the largest distance of a loss, and those of every stage."""

    steps: int
    kind: str  # of numbers
    tolerance: float
    loss: Distance
    stages: list[StageDistance]

    @property
    def ok(self) -> bool:
        every = [self.loss, *(part for stage in self.stages for part in (stage.gradient, stage.weight))]
        return all(distance.relative <= self.tolerance for distance in every)

    def to_json(self) -> dict[str, Any]:
        plain = {"steps": self.steps, "kind": self.kind, "tolerance": self.tolerance, "loss": vars(self.loss)}
        return {"ok": self.ok, **plain, "stages": [stage.to_json() for stage in self.stages]}


def verify(request: Request) -> int:
    """Compare, and on the first rank say what was found: 0 where it is within tolerance, else 1."""
    verdict = compare(request.task(double=not request.flags.get("as_trained")), int(request.flags["steps"]))
    if rank() == 0:
        if request.flags.get("json"):
            print(json.dumps(verdict.to_json()), flush=True)
        else:
            _say(verdict)
        return 0 if verdict.ok else 1
    return 0  # the first rank's code is the answer


def compare(task: Task, steps: int) -> Verdict:
    """Train both for some steps. Every rank gets the same verdict."""
    refuse_asynchronous(task.config.pipeline.schedule)
    kind = _kind(task)
    plain = Plain(task)
    _refuse_random(task, plain)
    recorder = Recorder(task.optimizer)
    pipe = task.pipeline(recorder.optimizer)
    loss, mine = Distance(), {stage: StageDistance(stage) for stage in sorted({*pipe.crew.here})}
    for inputs, target in task.batches(0, steps):
        found, wanted = pipe.step(inputs, target).loss, plain.step(inputs, target)
        loss.meet(Distance(abs(found - wanted), abs(found - wanted) / max(abs(wanted), 1e-300), "loss"))
        _compare_tensors(mine, pipe.split.owner, recorder, plain)
    told = pipe.crew.world.gather(json.dumps([stage.to_json() for stage in mine.values()]).encode())
    every = [StageDistance.from_json(stage) for part in told for stage in json.loads(part)]
    return Verdict(steps, kind, TOLERANCE[kind], loss, sorted(every, key=lambda stage: stage.stage))


def _compare_tensors(mine: dict[int, StageDistance], owner: dict[str, int], recorder: Recorder, plain: Plain) -> None:
    weights = {name: weight.detach() for name, weight in plain.model.named_parameters()}
    gradients = {name: p.grad for name, p in plain.model.named_parameters() if p.grad is not None}
    kinds = (("gradient", recorder.gradients, gradients), ("weight", recorder.weights, weights))
    for kind, found, wanted in kinds:
        here = {name: tensor for name, tensor in wanted.items() if owner[name] in mine}
        for name, distance in distances(found, here, largest_norm(wanted)).items():
            getattr(mine[owner[name]], kind).meet(distance)
    for stage in mine.values():
        stage.tensors = sum(owner[name] == stage.stage for name in weights)
    recorder.gradients.clear()


def _kind(task: Task) -> str:
    if task.precision == "fp16":
        came, advice = "fp16, whose scale skips updates", "leave --as-trained or pipeline.precision out"
        raise InputError("float32 or bf16 to compare", came, advice)
    return "double" if task.double else task.precision or "float32"


def refuse_asynchronous(schedule: str) -> None:
    """Before any worker is started."""
    if find(schedule).asynchronous:
        raise InputError(
            "a synchronous schedule to verify, which trains as one plain process does",
            f"{schedule!r}, whose weights are stale on purpose",
            "verify 1f1b of the same stages, and see what staleness does by penstock compare",
        )


def _refuse_random(task: Task, plain: Plain) -> None:
    """Dropout is drawn by stage and micro-batch in a pipeline, and in one stream in a plain process."""
    (inputs, target), *_ = task.batches(0, 1)
    found = []
    for _ in range(2):
        once = copy.copy(plain)
        once.model = copy.deepcopy(plain.model)
        found.append(once.losses(inputs, target))
    if found[0] != found[1]:
        raise InputError(
            "a model that gives the same twice, so that two runs of it can be compared",
            "one that draws random numbers",
            "set its dropout to 0 for verify",
        )


def _say(verdict: Verdict) -> None:
    """A distance is two numbers: the largest of any number, and of a tensor in parts of its norm."""
    table = Table("stage", "tensors", "gradients", "the furthest", "weights", "the furthest")
    for stage in verdict.stages:
        cells = [cell for part in (stage.gradient, stage.weight) for cell in (_figures(part), part.name or "none")]
        table.add_row(str(stage.stage), str(stage.tensors), *cells)
    console = Console()
    console.print(table)
    same = f"the pipeline {'trains' if verdict.ok else 'does NOT train'} as one plain process"
    said = [
        "largest distances: of any number; of a tensor, in parts of its norm",
        f"loss: {_figures(verdict.loss)}",
        f"{same}: {verdict.steps} steps in {verdict.kind}, tolerance {verdict.tolerance:g}",
    ]
    if not verdict.ok and verdict.kind != "double":
        said.append("this may be rounding, which grows with the steps: leave --as-trained out to see without")
    console.print("\n".join(said), highlight=False, soft_wrap=True)


def _figures(distance: Distance) -> str:
    return f"{distance.absolute:.1e}; {distance.relative:.1e}"


if __name__ == "__main__":
    as_worker(verify)
