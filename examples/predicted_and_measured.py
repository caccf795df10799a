"""A measured step under the one that the simulator predicts from the steps before it, as a picture.

    python examples/predicted_and_measured.py sleeping predicted-measured.svg    # four workers of this host
    python examples/predicted_and_measured.py gpt predicted-measured-gpt.svg     # two

`sleeping` are stages that only sleep, so that four of them run on two cores without disturbing each other; `gpt` is a
small GPT on random tokens. It starts its own workers; under torchrun it is one of those. A timeline can also be kept as
JSON, `json.dumps(pipe.timeline().to_json())`, which `penstock show` reads.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import penstock
from penstock.app.run.launcher import launch
from penstock.models.gpt import GPT
from penstock.reports.figures import headline
from penstock.reports.svg import svg
from penstock.reports.tables import memory_table
from penstock.training.measurement.measured import Measured

RANKS = {"sleeping": 4, "gpt": 2}
MICROBATCHES, STEPS = 8, 12
FORWARD, BACKWARD = 0.005, 0.010  # seconds


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(BACKWARD)
        return gradients[0]


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(self.linear(x))  # type: ignore[no-untyped-call,no-any-return]


def token_loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def pipeline(kind: str) -> tuple[penstock.Pipeline, Callable[[], penstock.Step]]:
    """A pipeline and its step."""
    torch.manual_seed(0)
    if kind == "sleeping":
        x = y = torch.randn(MICROBATCHES, 64)
        model: Any = [Sleeper() for _ in range(RANKS[kind])]
        pipe = penstock.Pipeline(model, example=x[:1], microbatches=MICROBATCHES, loss=F.mse_loss, optimizer=adamw)
    else:
        x = y = torch.randint(0, 100, (4 * MICROBATCHES, 64))
        model = GPT(vocab=100, width=256, heads=4, layers=8, length=64)
        pipe = penstock.Pipeline(
            model, example=x[:4], stages=RANKS[kind], microbatches=MICROBATCHES, loss=token_loss, optimizer=adamw
        )
    return pipe, lambda: pipe.step(x, y)


def train(kind: str, picture: Path) -> None:
    torch.set_num_threads(1)
    pipe, step = pipeline(kind)
    for _ in range(STEPS):
        step()
    found = pipe.measured()
    if os.environ["RANK"] == "0":
        write(found, picture)


def write(found: Measured, picture: Path) -> None:
    lines = {"predicted": found.predicted(), "measured": found.timeline()}
    picture.write_text(svg(list(lines.items())), encoding="utf-8")
    for line in lines.values():
        print(headline(line))
    off = lines["predicted"].makespan / lines["measured"].makespan - 1
    print(f"predicted from the steps before: {off:+.1%}")
    Console().print(memory_table(lines["predicted"], [memory.measured for memory in found.memory()]))


def main(kind: str = "sleeping", picture: str = "predicted-measured.svg") -> int:
    if kind not in RANKS:
        print(f"expected {' or '.join(RANKS)}, but got {kind!r}", file=sys.stderr)
        return 2
    if "RANK" in os.environ:
        train(kind, Path(picture))
        return 0
    return launch([sys.executable, __file__, kind, picture], RANKS[kind])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
