"""The methods compared: a schedule with its options, and the optimizer of every stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import NAdam, Optimizer

from penstock.training.optimizers import Muon as BothMuon

Make = Callable[..., Optimizer]
WARM_UP = 20  # updates over which every learning rate rises
T1, T3 = 50, 20  # updates: a quarter of the text's run, a tenth of it
AdamW: Make = partial(torch.optim.AdamW, fused=True)
LookAhead: Make = partial(NAdam, betas=(0.99, 0.999), decoupled_weight_decay=True, weight_decay=0.01)


def of_a_block(name: str, parameter: nn.Parameter) -> bool:
    """By the shape: a stage's parameters come here without names."""
    shape = parameter.shape
    return len(shape) == 2 and max(shape) <= 4 * min(shape) and shape[0] % 32 == 0


Muon: Make = partial(BothMuon, matrices=of_a_block)


@dataclass(frozen=True)
class Method:
    name: str
    schedule: str
    optimizer: Make = AdamW
    options: dict[str, Any] = field(default_factory=dict)
    staged: bool = True  # whether the losses depend on the number of stages
    stages: tuple[int, ...] = (8, 16, 4)  # where it is trained, if they do: the aim is at 8
    times: int = 0  # micro-batches a mini-batch, as a multiple of the stages; 0: one
    tasks: tuple[str, ...] = ("text", "digits")

    def shape(self, stages: int) -> tuple[int, int]:
        """Stages and micro-batches of the run that trains.

        The losses of synchronous methods and of 2bw (delay one on every stage) are those of one and of two stages.
        """
        if self.staged:
            return stages, max(1, self.times * stages)
        return (2, 2) if self.schedule == "2bw" else (1, 1)


METHODS = {
    method.name: method
    for method in (
        Method("synchronous", "1f1b", staged=False),
        Method("2bw", "2bw", staged=False, times=1),
        Method("pipedream m=4p muon", "pipedream", Muon, stages=(8,), times=4, tasks=("text",)),
        Method("pipedream", "pipedream"),
        Method("pipedream nesterov", "pipedream", LookAhead),
        Method("pipedream predict", "pipedream", options={"predict": "xpipe"}),
        Method("pipemare T1+T2", "pipemare", options={"t1": T1}),
        Method("pipemare T2", "pipemare", stages=(8,)),
        Method("pipemare bare", "pipemare", options={"t2": False}, stages=(8,)),
        Method("pipemare T1+T2+T3", "pipemare", options={"t1": T1, "t3": T3}, stages=(8,)),
        Method("pipedream vertical", "pipedream", options={"vertical_sync": True}, stages=(8,)),
        Method("synchronous nesterov", "1f1b", LookAhead, staged=False),
        Method("2bw nesterov", "2bw", LookAhead, staged=False, times=1),
        Method("2bw predict", "2bw", options={"predict": "xpipe"}, staged=False, times=1),
        Method("synchronous muon", "1f1b", Muon, staged=False, tasks=("text",)),
        Method("2bw muon", "2bw", Muon, staged=False, times=1, tasks=("text",)),
    )
}


def warming(optimizer: Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / WARM_UP))
