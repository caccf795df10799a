"""`penstock verify`: train some steps as a pipeline and in one plain process, and report how much they differ.

Every rank also trains the plain model and compares its own stages. Distances of gradients and weights are the largest
of every stage, relative to each tensor's norm.
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
from penstock.app.run.plain import PlainTraining
from penstock.app.run.request import Request, rank, run_worker
from penstock.errors import InputError
from penstock.schedules.registry import find

FLOOR = 1e-3  # of the largest tensor's norm: the least norm that a distance is relative to, because of rounding


@dataclass
class Distance:
    """The largest distance of many tensors: of any number, and of a tensor relative to its norm, with the tensor's
    name."""

    absolute: float = 0.0
    relative: float = 0.0
    name: str = ""

    def keep_worse(self, other: Distance) -> None:
        """Keep the larger of two distances; NaN counts as the largest."""
        if other.relative > self.relative or other.relative != other.relative:
            self.relative, self.name = other.relative, other.name
        self.absolute = max(self.absolute, other.absolute)


@dataclass
class StageDistance:
    """The distances of one stage over all steps."""

    stage: int
    tensors: int = 0
    gradient: Distance = field(default_factory=Distance)
    weight: Distance = field(default_factory=Distance)

    def keep_worse(self, other: StageDistance) -> None:
        """Keep the larger distances of two replicas of the stage."""
        self.gradient.keep_worse(other.gradient)
        self.weight.keep_worse(other.weight)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StageDistance:
        return cls(data["stage"], data["tensors"], Distance(**data["gradient"]), Distance(**data["weight"]))


class Recorder:
    """A factory of a pipeline's optimizers that records their gradients by the model's own names."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.make = make
        self.weights: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def optimizer(self, names: list[str], params: list[Tensor]) -> torch.optim.Optimizer:
        optimizer = self.make(names, params)
        weights = dict(zip(names, params, strict=True))
        self.weights |= weights

        def record(*_: Any) -> None:
            self.gradients |= {name: p.grad.detach().clone() for name, p in weights.items() if p.grad is not None}

        optimizer.register_step_pre_hook(record)
        return optimizer


def distances(tensors: dict[str, Tensor], references: dict[str, Tensor], largest: float) -> dict[str, Distance]:
    """Return the distance of every tensor; infinite for one that only one side has."""
    every = {}
    for name in tensors.keys() | references.keys():
        if name not in tensors or name not in references:
            every[name] = Distance(float("inf"), float("inf"), name)
            continue
        off = (tensors[name].detach() - references[name].detach()).double()
        scale = max(references[name].double().norm().item(), FLOOR * largest, 1e-300)
        every[name] = Distance(off.abs().max().item() if off.numel() else 0.0, off.norm().item() / scale, name)
    return every


def largest_norm(tensors: dict[str, Tensor]) -> float:
    return max((tensor.detach().double().norm().item() for tensor in tensors.values()), default=0.0)


# Relative to each tensor's norm. In single precision rounding grows: AdamW's first steps are as long for a gradient
# that is only rounding as for any other. In double precision only a fault comes near the bound.
TOLERANCE = {"double": 1e-9, "float32": 1e-5, "bf16": 1e-2}


@dataclass(frozen=True)
class Verdict:
    """The result over some steps: the largest distance of a loss, and those of every stage."""

    steps: int
    kind: str  # the number type
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
    """Compare, and print the result on the first rank. Return 0 if it is within tolerance, else 1."""
    verdict = compare(request.task(double=not request.flags.get("as_trained")), int(request.flags["steps"]))
    if rank() == 0:
        if request.flags.get("json"):
            print(json.dumps(verdict.to_json()), flush=True)
        else:
            _print(verdict)
        return 0 if verdict.ok else 1
    return 0  # the first rank's code is the answer


def compare(task: Task, steps: int) -> Verdict:
    """Train both for some steps. Every rank returns the same result."""
    refuse_asynchronous(task.config.pipeline.schedule)
    kind = _kind(task)
    plain = PlainTraining(task)
    _refuse_random(task, plain)
    recorder = Recorder(task.optimizer)
    pipe = task.pipeline(recorder.optimizer)
    loss, own_stages = Distance(), {stage: StageDistance(stage) for stage in sorted({*pipe.ranks.here})}
    for inputs, target in task.batches(0, steps):
        loss_of_pipeline, plain_loss = pipe.step(inputs, target).loss, plain.step(inputs, target)
        loss.keep_worse(
            Distance(
                abs(loss_of_pipeline - plain_loss),
                abs(loss_of_pipeline - plain_loss) / max(abs(plain_loss), 1e-300),
                "loss",
            )
        )
        _compare_tensors(own_stages, pipe.split.owner, recorder, plain)
    parts = pipe.ranks.world.gather(json.dumps([stage.to_json() for stage in own_stages.values()]).encode())
    stages: dict[int, StageDistance] = {}
    for one in (StageDistance.from_json(stage) for part in parts for stage in json.loads(part)):
        stages.setdefault(one.stage, one).keep_worse(one)
    return Verdict(steps, kind, TOLERANCE[kind], loss, [stages[at] for at in sorted(stages)])


def _compare_tensors(
    own_stages: dict[int, StageDistance], owner: dict[str, int], recorder: Recorder, plain: PlainTraining
) -> None:
    weights = {name: weight.detach() for name, weight in plain.model.named_parameters()}
    gradients = {name: p.grad for name, p in plain.model.named_parameters() if p.grad is not None}
    kinds = (("gradient", recorder.gradients, gradients), ("weight", recorder.weights, weights))
    for kind, tensors, references in kinds:
        here = {name: tensor for name, tensor in references.items() if owner[name] in own_stages}
        for name, distance in distances(tensors, here, largest_norm(references)).items():
            getattr(own_stages[owner[name]], kind).keep_worse(distance)
    for stage in own_stages.values():
        stage.tensors = sum(owner[name] == stage.stage for name in weights)
    recorder.gradients.clear()


def _kind(task: Task) -> str:
    if task.precision == "fp16":
        came, advice = "fp16, whose scale skips updates", "leave --as-trained or pipeline.precision out"
        raise InputError("float32 or bf16 to compare", came, advice)
    return "double" if task.double else task.precision or "float32"


def refuse_asynchronous(schedule: str) -> None:
    """Raise for an asynchronous schedule, before any worker is started."""
    if find(schedule).asynchronous:
        raise InputError(
            "a synchronous schedule to verify, which trains as one plain process does",
            f"{schedule!r}, whose weights are stale on purpose",
            "verify 1f1b of the same stages, and see what staleness does by penstock compare",
        )


def _refuse_random(task: Task, plain: PlainTraining) -> None:
    """Raise for a model with dropout: a pipeline draws it by stage and micro-batch, a plain process in one stream."""
    (inputs, target), *_ = task.batches(0, 1)
    losses = []
    for _ in range(2):
        trial = copy.copy(plain)
        trial.model = copy.deepcopy(plain.model)
        losses.append(trial.losses(inputs, target))
    if losses[0] != losses[1]:
        raise InputError(
            "a model that gives the same twice, so that two runs of it can be compared",
            "one that draws random numbers",
            "set its dropout to 0 for verify",
        )


def _print(verdict: Verdict) -> None:
    """Print the result. A distance is two numbers: the largest of any number, and of a tensor relative to its norm."""
    table = Table("stage", "tensors", "gradients", "the furthest", "weights", "the furthest")
    for stage in verdict.stages:
        cells = [cell for part in (stage.gradient, stage.weight) for cell in (_figures(part), part.name or "none")]
        table.add_row(str(stage.stage), str(stage.tensors), *cells)
    console = Console()
    console.print(table)
    same = f"the pipeline {'trains' if verdict.ok else 'does NOT train'} as one plain process"
    lines = [
        "largest distances: of any number; of a tensor, in parts of its norm",
        f"loss: {_figures(verdict.loss)}",
        f"{same}: {verdict.steps} steps in {verdict.kind}, tolerance {verdict.tolerance:g}",
    ]
    if not verdict.ok and verdict.kind != "double":
        lines.append("this may be rounding, which grows with the steps: leave --as-trained out to see without")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _figures(distance: Distance) -> str:
    return f"{distance.absolute:.1e}; {distance.relative:.1e}"


if __name__ == "__main__":
    run_worker(verify)
