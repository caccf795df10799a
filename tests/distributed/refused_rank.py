"""A rank that trains some steps, of which one goes wrong in its backward, and says what its weights were around it.

python refused_rank.py '{"what": "nan", "who": 1, "schedule": "1f1b", "file": ...}'
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock

torch.set_num_threads(1)
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PARTS, WRONG = 4, 2  # micro-batches of a step, and the step that goes wrong


class Fault:
    """Poisons a gradient, or ends the process, in the last backward of one step."""

    def __init__(self, what: str) -> None:
        self.what, self.calls, self.on = what, 0, True

    def __call__(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        if not self.on or self.calls != PARTS * (WRONG + 1):
            return gradient
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient * float(self.what)


def mark(parameters: list[nn.Parameter]) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parameters)).hexdigest()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 6, generator=draw), torch.randn(8, 6, generator=draw)) for _ in range(count)]


def make(schedule: str) -> penstock.Pipeline:
    torch.manual_seed(3)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())]
    return penstock.Pipeline(
        nn.Sequential(*layers), example=torch.ones(4, 6), cuts=[str(8 // SIZE * at) for at in range(1, SIZE)],
        microbatches=PARTS, schedule=schedule, loss=nn.functional.mse_loss, timeout=20,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    )  # fmt: skip


def main(asked: dict[str, Any]) -> None:
    print(f"rank {RANK} begins as {os.getpid()}", flush=True)
    pipe = make(asked.get("schedule", "1f1b"))
    mine = pipe.optimizers.parameters
    fault = Fault(asked["what"])
    if asked["who"] == RANK:
        mine[0].register_hook(fault)
    found: dict[str, Any] = {"losses": [], "marks": [mark(mine)]}
    data = batches(6)
    if asked["what"] == "left out":
        del data[WRONG]
    for x, y in data if pipe.async_trainer is None else []:
        try:
            found["losses"].append(pipe.step(x, y).loss)
        except penstock.PenstockError as error:
            if not asked.get("caught", True):
                raise
            found["error"], found["after"] = f"{type(error).__name__}: {error}", mark(mine)
            if isinstance(error, penstock.RankError):
                break
            fault.on = False
        found["marks"].append(mark(mine))
    if pipe.async_trainer is not None:
        try:
            for step in pipe.train(data):
                found["losses"].append(step.loss)
        except penstock.PenstockError as error:
            found["error"], found["after"] = f"{type(error).__name__}: {error}", mark(mine)
            found["finite"] = all(bool(p.isfinite().all()) for p in mine)
            try:
                pipe.save(f"{asked['file']}.saved")
            except penstock.PenstockError as refused:
                found["refused"] = str(refused)
    found["steps"] = [len(optimizer.state) for optimizer in pipe.optimizers.optimizers.values()]
    Path(f"{asked['file']}.{RANK}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
