"""Trains models whose micro-batches have unequal counts of ignored tokens, and writes each case's losses and weights.

python weights_rank.py FILE, by every rank; rank 0 writes. `cases` gives the same models and batches to a plain process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.models.gpt import GPT

WORDS, LENGTH, ROWS = 19, 6, 8
torch.set_num_threads(1)


class Labelled(nn.Module):
    """Computes its loss itself; beside a balance loss that is the same however a batch is cut, where `balance` is."""

    def __init__(self, balance: float = 0.0) -> None:
        super().__init__()
        self.gpt, self.balance = gpt(), balance

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.gpt(ids)
        ahead = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        loss = F.cross_entropy(logits.flatten(0, 1), ahead.flatten())
        if not self.balance:
            return {"loss": loss}
        balance = logits.square().mean()
        return {"loss": loss + self.balance * balance, "balance": balance}


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    inside: bool = False


def gpt() -> GPT:
    torch.manual_seed(3)
    return GPT(vocab=WORDS, width=8, heads=2, layers=4, length=LENGTH).double()


def mean(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


CASES = {
    "outside": Case(gpt, mean),
    "beside another": Case(gpt, lambda out, y: mean(out, y) + 0.1 * out.square().mean()),
    "inside": Case(Labelled, lambda out, _: out["loss"], inside=True),
    "two scalars": Case(lambda: Labelled(0.3), lambda out, _: out["loss"], inside=True),
}


def batches(case: Case) -> list[tuple[Any, Any]]:
    """Full; with five ignored tokens; with a micro-batch that has nothing to count."""
    draw, found = torch.Generator().manual_seed(5), []
    for ignored in ([], [5], [1, 0, 6, 3, 6, 6, 2, 4]):
        x, y = (torch.randint(0, WORDS, (ROWS, LENGTH), generator=draw) for _ in range(2))
        for row, count in enumerate(ignored):
            y[row, :count] = -100
        found.append(({"ids": x, "labels": y}, None) if case.inside else (x, y))
    return found


def descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def trained(case: Case, stages: int, schedule: str, data: str) -> dict[str, Any]:
    given, model = batches(case), case.model()
    example = {name: value[:2] for name, value in given[0][0].items()} if case.inside else given[0][0][:2]
    pipe = penstock.Pipeline(
        model, example=example, stages=stages, microbatches=4, schedule=schedule, loss=case.loss, optimizer=descent,
        data=data,
    )  # fmt: skip
    first = data == "every" or os.environ.get("RANK", "0") == "0"
    losses = [step.loss for step in pipe.train(given if first else None)]
    return {"losses": losses, "evaluated": pipe.evaluate(given if first else None), "weights": pipe.state_dict()}


def own_mean(out: Tensor, y: Tensor) -> Tensor:
    every = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")
    return every.sum() / (y >= 0).sum()


def main(file: str) -> None:
    stages = int(os.environ["WORLD_SIZE"])
    found = {
        (name, schedule): trained(case, stages, schedule, data)
        for name, case in CASES.items()
        for schedule, data in (("1f1b", "every"), ("zb-h1", "rank0"))
    }
    if os.environ["RANK"] == "0":
        torch.save(found, file)


if __name__ == "__main__":
    if sys.argv[1] == "refused":
        print(f"rank {os.environ['RANK']} begins as {os.getpid()}", flush=True)
        trained(Case(gpt, own_mean), int(os.environ["WORLD_SIZE"]), sys.argv[2], "every")
    else:
        main(sys.argv[1])
