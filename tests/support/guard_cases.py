"""The guard's cases: which schedules, models and settings are trained, and how one of them is run.

Only the public API is used, so the same cases can be run before and after the code behind it is moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import penstock
from guard_models import MODELS, Task, task

LR = 1e-2


@dataclass(frozen=True)
class Case:
    """A schedule by its name in SCHEDULES, a model by its name, a setting by its name in SETTINGS."""

    schedule: str
    model: str
    setting: str

    @property
    def name(self) -> str:
        return f"{self.schedule} | {self.model} | {self.setting}"


# -- schedules: by name the pieces of a model for each rank, and the arguments of a Pipeline -------------------------

Arguments = dict[str, Any]


def _by_name(method: str, microbatches: int | None = None, **options: Any) -> Callable[[int], Arguments]:
    """A method with its options; as many micro-batches as ranks where no number is given."""
    return lambda ranks: {"schedule": method, "microbatches": microbatches or ranks, **options}


def _made(method: str, microbatches: int | None = None, **options: Any) -> Callable[[int], Arguments]:
    """The same as a Schedule."""

    def arguments(ranks: int) -> Arguments:
        parts = microbatches or 2 * ranks
        return {
            "schedule": penstock.schedule(method, stages=ranks, microbatches=parts, **options),
            "microbatches": parts,
        }

    return arguments


def _own(ranks: int) -> Arguments:
    """Backwards from the last micro-batch to the first, which are split on every second rank."""
    lines = []
    for rank in range(ranks):
        words = [f"{rank}F{part}" for part in range(4)]
        for part in (3, 2, 1, 0):
            words += [f"{rank}I{part}", f"{rank}W{part}"] if rank % 2 else [f"{rank}B{part}", ""]
        lines.append(",".join(words))
    return {"schedule": penstock.from_csv("\n".join(lines)), "microbatches": 4}


def _own_list(ranks: int) -> Arguments:
    """A few mini-batches of PipeDream as a file, drained and filled anew at its end."""
    listed = penstock.schedule("pipedream", stages=ranks, microbatches=2, batches=3)
    return {"schedule": penstock.from_csv(penstock.to_csv(listed)), "microbatches": 2}


def _own_loop(ranks: int) -> Arguments:
    return {"schedule": penstock.loop("pipedream", stages=ranks, microbatches=1, stash=False), "microbatches": 1}


SYNCHRONOUS: dict[str, tuple[int, Callable[[int], Arguments]]] = {
    "naive": (1, _by_name("naive", 4)),
    "gpipe": (1, _by_name("gpipe", 4)),
    "1f1b": (1, _by_name("1f1b", 4)),
    "dapple-pa": (1, _by_name("dapple", 4, policy="pa")),
    "dapple-pb": (1, _by_name("dapple", 4, policy="pb")),
    "interleaved": (2, _by_name("interleaved", 4)),
    "zb-h1": (1, _by_name("zb-h1", 4)),
    "zb-h2": (1, _by_name("zb-h2", 4)),
    "zb-v": (2, _by_name("zb-v", 4)),
    "dualpipe-v": (2, _made("dualpipe-v", overlap=False)),
    "dualpipe-v overlapped": (2, _made("dualpipe-v", overlap=True)),
    "auto": (1, _by_name("auto", 4)),
    "auto of two chunks": (2, _by_name("auto", 4, chunks=2)),
    "own": (1, _own),
}
ASYNCHRONOUS: dict[str, tuple[int, Callable[[int], Arguments]]] = {
    "pipedream": (1, _by_name("pipedream", 1)),
    "pipedream of two micro-batches": (1, _by_name("pipedream", 2)),
    "pipedream with vertical sync": (1, _by_name("pipedream", 1, vertical_sync=True)),
    "pipedream without stash": (1, _by_name("pipedream", 1, stash=False)),
    "2bw": (1, _by_name("2bw")),
    "pipemare": (1, _by_name("pipemare", 1)),
    "own list": (1, _own_list),
    "own loop": (1, _own_loop),
}
SCHEDULES = SYNCHRONOUS | ASYNCHRONOUS
VARIANTS = ("dualpipe-v overlapped", "auto of two chunks", "pipedream of two micro-batches", "own loop")  # fewer cases

# -- settings --------------------------------------------------------------------------------------------------------


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR)


def _momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)  # high enough for a small fault to reach the weights


def _falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


CLIPPED = {"clip": 0.1, "optimizer": _momentum, "lr_scheduler": _falling}
SETTINGS: dict[str, Arguments] = {
    "plain": {},
    "clip": CLIPPED,
    "fp16": {"precision": "fp16"},
    "accumulate": {"accumulate": 2},
    "recompute": {"recompute": "always"},
    "recompute except-last": {"recompute": "except-last"},
    "bf16": {"precision": "bf16"},
    "offload activations": {"offload": "activations"},
    "offload weights": {"offload": "weights"},
    "offload all": {"offload": "all"},
    "all together": {**CLIPPED, "precision": "fp16", "accumulate": 2, "recompute": "always", "offload": "all"},
    "gloo": {"transport": "gloo"},
    "data on rank 0": {"data": "rank0"},
    "t1": {"t1": 6},
    "t2": {"t2": 0.3},
    "t2 off": {"t2": False},
    "t3": {"t3": 3},
    "xpipe": {"predict": "xpipe"},
    "spectrain": {"predict": "spectrain"},
    "nesterov": {"optimizer": penstock.nesterov(lr=LR)},
    "muon": {"optimizer": penstock.muon(lr=LR)},
    "t1 and t3, clipped": {"t1": 4, "t3": 2, **CLIPPED},
    "xpipe and t1, clipped": {"predict": "xpipe", "t1": 4, **CLIPPED},
    "fp16, clipped": {"precision": "fp16", **CLIPPED},
}
# The loss in fp16 is multiplied by this: the first update overflows and is skipped, the scale halves, others are made.
OVERFLOWING = {"gpt": 8.0, "unet": 32.0, "batchnorm": 8.0, "llama": 8.0}


def cases() -> Iterator[Case]:
    """All of them, each once."""
    for schedule in SYNCHRONOUS:
        for model in MODELS:
            settings = ("plain",) if schedule in VARIANTS else ("plain", "clip", "fp16", "accumulate", "recompute")
            yield from (Case(schedule, model, setting) for setting in settings)
    for schedule in ("1f1b", "interleaved", "zb-v", "own"):
        for setting in ("recompute except-last", "bf16", "offload activations", "offload weights", "offload all"):
            yield from (Case(schedule, model, setting) for model in ("gpt", "unet"))
        yield from (Case(schedule, "gpt", setting) for setting in ("all together", "gloo", "data on rank 0"))
    for schedule in ASYNCHRONOUS:
        yield from (Case(schedule, model, "plain") for model in MODELS)
        yield from (Case(schedule, "gpt", setting) for setting in ("clip", "xpipe", "t1 and t3, clipped"))
        if schedule not in VARIANTS:
            yield from _with_remedies(schedule)
    for flow in FLOWS:
        yield Case(flow, "gpt", "plain")
        yield Case(flow, "unet", "clip")


def _with_remedies(schedule: str) -> Iterator[Case]:
    yield from (Case(schedule, model, setting) for model in ("unet", "batchnorm") for setting in ("clip", "xpipe"))
    for setting in ("t1", "t2", "t2 off", "t3", "spectrain", "fp16, clipped"):
        yield from (Case(schedule, model, setting) for model in ("gpt", "unet"))
    for setting in ("nesterov", "muon", "xpipe and t1, clipped", "bf16", "recompute", "offload activations"):
        yield Case(schedule, "gpt", setting)
    yield from (Case(schedule, "gpt", setting) for setting in ("gloo", "data on rank 0"))


def only_alone(case: str) -> bool:
    """Whether ranks refuse by right what one process trains: a forecast of a weight whose optimizer is elsewhere."""
    return case.endswith(" | gpt | spectrain")


SAMPLE = (
    "1f1b | gpt | clip",
    "1f1b | gpt | all together",
    "interleaved | gpt | accumulate",
    "zb-h1 | unet | recompute",
    "zb-v | batchnorm | fp16",
    "dualpipe-v overlapped | gpt | plain",
    "own | unet | accumulate",
    "pipedream | gpt | xpipe",
    "pipedream with vertical sync | unet | plain",
    "2bw | gpt | fp16, clipped",
    "pipemare | gpt | t1 and t3, clipped",
    "own list | batchnorm | clip",
    "switched and saved | gpt | plain",
)

# -- one case --------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What one process has after a run: of weights and buffers a checksum, of each weight's optimizer state one."""

    weights: str
    optimizer: list[str]
    losses: str


def run(case: Case, ranks: int, rank: int, folder: Path) -> Result:
    """Train five mini-batches, six where two are accumulated; eight under an asynchronous schedule."""
    pieces, arguments_of = SCHEDULES.get(case.schedule, SYNCHRONOUS["1f1b"])
    setting = dict(SETTINGS[case.setting])
    count = 8 if case.schedule not in SYNCHRONOUS else 6 if "accumulate" in setting else 5
    this = task(case.model, pieces * ranks, count)
    optimizers: list[torch.optim.Optimizer] = []
    setting["optimizer"] = _keeping(setting.get("optimizer", _adamw), case.setting == "muon", optimizers)
    factor = OVERFLOWING[case.model] if setting.get("precision") == "fp16" else 1.0
    pipe = penstock.Pipeline(
        this.model, example=this.example, stages=ranks, loss=lambda result, target: factor * this.loss(result, target),
        verify=False, timeout=60, **arguments_of(ranks), **setting,
    )  # fmt: skip
    here = rank == 0 or setting.get("data") != "rank0"
    values = FLOWS[case.schedule](pipe, this, folder) if case.schedule in FLOWS else _train(pipe, this, here)
    state = pipe.state_dict()
    result = Result(
        checksum(sorted(state.items())),
        sorted(checksum(sorted(kept.items())) for made in optimizers for kept in made.state.values() if kept),
        checksum(values),
    )
    pipe.close()
    return result


def _keeping(make: Any, named: bool, kept: list[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """The same maker, whose optimizers are kept; a Pipeline tells by the signature whether it takes names."""

    def keep(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        kept.append(optimizer)
        return optimizer

    if named:
        return lambda names, params: keep(make(names, params))
    return lambda params: keep(make(params))


def _train(pipe: penstock.Pipeline, this: Task, here: bool) -> list[Any]:
    """Here: whether this process has the batches."""
    values = [_facts(step) for step in pipe.train(this.batches if here else None)]
    return [*values, pipe.evaluate(this.batches[3:4] if here else None)]


def _facts(step: penstock.Step) -> tuple[Any, ...]:
    return step.index, step.loss, step.updated, step.gradient_norm


def _switched(pipe: penstock.Pipeline, this: Task, folder: Path) -> list[Any]:
    """From schedule to schedule, in the middle of a loop too, with evaluations, and a checkpoint taken up again."""
    values: list[Any] = []
    for step in pipe.train(this.batches):
        values.append(_facts(step))
        if step.index == 1:
            pipe.switch("zb-h1", microbatches=4)
        if step.index == 2:
            pipe.switch("2bw", microbatches=4)
        if step.index == 5:
            values.append(pipe.evaluate(this.batches[:2]))
    pipe.save(folder / "checkpoint")
    pipe.switch("pipemare", microbatches=1, predict="xpipe", t1=3)
    values += [_facts(step) for step in pipe.train(this.batches[:4])]
    pipe.load(folder / "checkpoint")
    for step in pipe.train(this.batches):
        values.append(_facts(step))
        if step.index == 11:
            break
    pipe.switch("pipedream", microbatches=1, vertical_sync=True)
    values += [_facts(step) for step in pipe.train(this.batches[4:])]
    values.append(_facts(pipe.step(*this.batches[3])))
    return [*values, pipe.forward(this.example)]


FLOWS: dict[str, Callable[[penstock.Pipeline, Task, Path], list[Any]]] = {"switched and saved": _switched}


def checksum(value: Any) -> str:
    """Of every bit: tensors with their types and shapes, everything else as Python writes it."""
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)} of".encode())
        for part in value:
            _add(digest, part)
    else:
        digest.update(f"{value!r};".encode())
