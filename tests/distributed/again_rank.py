"""A rank on which something fails and is caught, and which then makes another pipeline and trains by it.

python again_rank.py '{"fault": "loss", "who": 1, "times": 2, ...}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.models.gpt import GPT

torch.set_num_threads(1)
OPTIONS = ("schedule", "transport")
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Failing(nn.Module):
    """A layer of the user's that fails at its second call, forward or backward."""

    def __init__(self, inner: nn.Module, way: str) -> None:
        super().__init__()
        self.inner, self.way, self.calls = inner, way, 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if not (self.training and torch.is_grad_enabled() and armed):
            return y
        self.calls += 1
        if self.calls == 2 and self.way == "forward":
            raise ValueError("no such luck")
        if self.calls == 2 and self.way == "backward":
            y.register_hook(_fail)
        return y


armed = False


def _fail(*_: Any) -> Any:
    raise ValueError("no such luck")


class Refusing(torch.optim.SGD):
    """Fails in its second update."""

    def step(self, closure: Any = None) -> None:
        self.taken = getattr(self, "taken", 0) + 1
        assert self.taken != 2, "no such luck"
        super().step()


def loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def wrong_shape(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="none")


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [(torch.randint(0, 32, (8, 8), generator=draw), torch.randint(0, 32, (8, 8), generator=draw))] * count


def ending_early(fault: bool) -> Any:
    yield from batches(1)
    if fault:
        raise ValueError("no such luck")
    yield from batches(5)


def make(fault: str = "", mine: bool = False, **asked: Any) -> penstock.Pipeline:
    torch.manual_seed(3)
    model = GPT(vocab=32, width=16, heads=2, layers=4, length=8)
    if fault in ("forward", "backward"):
        for at in range(4):
            model.blocks[at] = Failing(model.blocks[at], fault)
    optimizer = Refusing if fault == "update" and mine else torch.optim.SGD
    if fault == "construction" and mine:
        optimizer = _fail
    return penstock.Pipeline(
        model, example=batches(1)[0][0][:2], stages=SIZE, microbatches=4,
        loss=wrong_shape if fault == "loss" else loss, schedule=asked.get("schedule", "1f1b"), timeout=20,
        optimizer=lambda params: optimizer(params, lr=0.1), transport=asked.get("transport"),
    )  # fmt: skip


def attempt(fault: str, mine: bool, **asked: Any) -> None:
    """Something that ends in an exception on every rank."""
    global armed
    pipe = make(fault, mine, **asked)
    armed = mine
    try:
        if fault == "iterator":
            for _ in pipe.train(ending_early(mine)):
                pass
        elif fault == "checkpoint":
            pipe.save("/proc/none/such")
        elif fault == "evaluation":
            pipe.loss = wrong_shape
            pipe.evaluate(batches(1))
        else:
            for _ in range(asked.get("tries", 2)):
                try:
                    for _ in pipe.train(batches(4)):
                        pass
                except Exception as error:
                    if asked.get("ends") == RANK:
                        raise
                    print(f"rank {RANK} caught {type(error).__name__}: {error}", flush=True)
            raise RuntimeError("both tries have failed")
    finally:
        armed = False


def main(asked: dict[str, Any]) -> None:
    print(f"rank {RANK} begins as {os.getpid()}", flush=True)
    mine = asked.get("who", RANK) == RANK
    for _ in range(asked.get("times", 1)):
        try:
            attempt(mine=mine, **{key: asked[key] for key in asked if key in (*OPTIONS, "fault", "tries", "ends")})
        except Exception as error:
            if asked.get("ends") == RANK:
                raise
            print(f"rank {RANK} caught {type(error).__name__}: {error}", flush=True)
    pipe = make(**{key: asked[key] for key in asked if key in OPTIONS})
    losses = [step.loss for step in pipe.train(batches(3))]
    state = {name: tensor.tolist() for name, tensor in pipe.state_dict().items()}
    Path(f"{asked['file']}.{RANK}").write_text(json.dumps({"losses": losses, "state": state}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
