"""Pipelines to save and load, and all of their state, read without any of the checkpoints' code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import plain
from penstock import Pipeline
from penstock.models.gpt import GPT

VOCAB, LENGTH = 31, 8


def gpt(stages: int, dropout: float = 0.1, double: bool = False, **more: Any) -> Pipeline:
    torch.manual_seed(5)
    model = GPT(vocab=VOCAB, width=16, heads=2, layers=4, length=LENGTH, dropout=dropout)
    return Pipeline(
        model.double() if double else model,
        example=batch(0)[0][:2],
        stages=stages,
        **{
            "optimizer": decayed,
            "lr_scheduler": rising,
            "clip": 0.5,
            "microbatches": 4,
            "loss": plain.token_loss,
            "verify": False,
            **more,
        },
    )


def conv(stages: int, double: bool = False, **more: Any) -> Pipeline:
    torch.manual_seed(6)
    model, example = plain.conv_net(), pictures(0)[0][:2]
    return Pipeline(
        model.double() if double else model,
        example=example.double() if double else example,
        stages=stages,
        **{"optimizer": momentum, "microbatches": 4, "loss": nn.functional.cross_entropy, "verify": False, **more},
    )


def decayed(names: list[str], params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with weight decay for matrices alone, and another rate for one layer: the groups differ by stage."""
    named = list(zip(names, params, strict=True))
    groups = [
        {"params": [p for n, p in named if p.dim() > 1 and "blocks.2" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.dim() < 2 and "blocks.2" not in n], "weight_decay": 0.0},
        {"params": [p for n, p in named if "blocks.2" in n], "lr": 3e-3},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def rising(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / (step + 3))


def batch(number: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 + number)
    x, y = torch.randint(0, VOCAB, (2, 8, LENGTH), generator=source)
    return x, y


def pictures(number: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(200 + number)
    return torch.randn(8, 2, 6, 6, generator=source), torch.randint(0, 3, (8,), generator=source)


def steps(pipe: Pipeline, count: int, given: Any = batch) -> list[float]:
    """The losses of the next batches."""
    return [pipe.step(*typed(pipe, given(pipe.index))).loss for _ in range(count)]


def typed(pipe: Pipeline, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A batch whose numbers are of the model's type."""
    inputs, target = given
    return inputs.to(next(pipe.model.parameters()).dtype) if inputs.is_floating_point() else inputs, target


def state(pipe: Pipeline) -> dict[str, Any]:
    """Of the stages that run here: weights, buffers, and what their optimizers and LR schedulers hold."""
    parts = pipe.optimizers
    found: dict[str, Any] = {name: parameter.detach().clone() for parameter, name in parts.names.items()}
    home = pipe.split.buffer_stages()
    buffers = {name: b.clone() for name, b in pipe.model.named_buffers() if home.get(name, 0) in pipe.ranks.here}
    found |= buffers
    for optimizer in parts.optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = parts.names[parameter]
                found |= {f"{name} {key}": _copy(value) for key, value in optimizer.state[parameter].items()}
                found |= {
                    f"{name} {key}": value for key, value in group.items() if key not in ("params", "param_names")
                }
    if parts.schedulers:
        found["scheduler"] = getattr(parts.schedulers[0], "last_epoch", None)  # one that chains others has none
    found |= {f"{parts.names[parameter]} sum": total.clone() for parameter, total in parts.sums.items()}
    return found | {"step": pipe.index, "scale": parts.scale, "weight": parts.weight, "steps": parts.steps}


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not the same to the bit."""
    found = sorted(one.keys() ^ other.keys())
    for key in one.keys() & other.keys():
        a, b = one[key], other[key]
        tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
        if not (torch.equal(a, b) and a.dtype is b.dtype if tensors else type(a) is type(b) and a == b):
            found.append(key)
    return found


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
