"""Replicated stages without a flush, which workers and the inline engine must train to the same bits.

Run as a script, by every rank: python async_replicas.py FILE HOW, which writes what every rank found for all cases;
then, where HOW is given, one rank does what it should not.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
import recursion_models

Case = tuple[str, str, list[int], int, dict[str, Any]]  # model, schedule, replicas, micro-batches, options
CASES: dict[str, Case] = {
    "turns": ("chain", "pipedream", [2, 1], 1, {"clip": 0.1}),
    "turns at the end, of micro-batches": ("conv", "pipedream", [1, 2], 2, {}),
    "turns of one stage": ("chain", "pipedream", [3], 1, {}),
    "turns with recompute": ("gpt", "pipedream", [2, 1], 1, {"recompute": "always"}),
    "turns, vertical sync": ("chain", "pipedream", [2, 1], 1, {"vertical_sync": True}),
    "turns, batch norm and dropout": ("normed", "pipedream", [2, 1], 2, {}),
    "turns, data on rank 0": ("chain", "pipedream", [1, 2], 1, {"data": "rank0"}),
    "turns over gloo": ("chain", "pipedream", [2, 1], 1, {"transport": "gloo"}),
    "split, tied and clipped": ("tied gpt", "2bw", [2, 1], 2, {"clip": 0.5}),
    "split at the end, tied": ("tied gpt", "2bw", [1, 2], 2, {}),
    "split at the end": ("chain", "2bw", [1, 2], 2, {}),
    "split of one stage, batch norm and dropout": ("normed", "2bw", [3], 2, {}),
    "split, ignored tokens": ("tokens", "2bw", [1, 2], 2, {"verify": True}),
    "turns of three stages": ("chain", "pipedream", [2, 1, 1], 1, {}),
    "turns between unequal stages": ("chain", "pipedream", [2, 2], 1, {}),
    "split between equal stages, clipped": ("normed", "2bw", [2, 2], 2, {"clip": 0.3}),
    "split between unequal stages, tied": ("tied gpt", "2bw", [1, 3], 2, {}),
}


def cases(ranks: int) -> list[str]:
    return [name for name, case in CASES.items() if sum(case[2]) == ranks]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.enter(ids)))


def model_of(kind: str, stages: int) -> tuple[nn.Module, Callable[..., Any], list[tuple[Any, Any]], list[str]]:
    """A model, its loss, ten batches and where it is cut."""
    if kind in ("chain", "conv", "gpt", "tied gpt"):
        made = {
            "chain": lambda: recursion_models.chain(stages, layers=4, width=3),
            "conv": lambda: recursion_models.conv_net(stages, layers=4, channels=2, side=3),
            "gpt": lambda: recursion_models.gpt(stages, layers=4, tied=False, width=4, length=3),
            "tied gpt": lambda: recursion_models.gpt(stages, layers=4, width=4, length=3),
        }[kind]()
        return made.module, made.loss, made.batches(10, rows=7), [str(at) for at in range(1, stages)]
    torch.manual_seed(3)
    if kind == "tokens":
        ids = [torch.randint(0, 7, (8, 3)) for _ in range(10)]
        batches = [(one, one.where(torch.rand(8, 3) < 0.6, -100)) for one in ids]
        return Tokens(), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), batches, ["head"]
    layers = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Tanh()) for _ in range(2))
    batches = [(torch.randn(12, 4), torch.randn(12, 4)) for _ in range(10)]
    return nn.Sequential(*layers), F.mse_loss, batches, ["1"][: stages - 1]


def mark(pipe: penstock.Pipeline) -> str:
    state = pipe.state_dict()
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()


def pipeline(name: str) -> tuple[penstock.Pipeline, list[tuple[Any, Any]]]:
    kind, schedule, replicas, m, options = CASES[name]
    model, loss, batches, cuts = model_of(kind, len(replicas))
    given = {"verify": False, "timeout": 60} | options
    pipe = penstock.Pipeline(
        model, example=batches[0][0][:4], stages=len(replicas), cuts=cuts, schedule=schedule, microbatches=m, loss=loss,
        replicas=replicas, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1), **given,
    )  # fmt: skip
    return pipe, batches


def run(name: str, folder: str) -> dict[str, Any]:
    """A loop with an evaluation in it, a step, a loop that is left early, a checkpoint, and a switch in a loop."""
    schedule, m = CASES[name][1], CASES[name][3]
    pipe, batches = pipeline(name)
    here = CASES[name][4].get("data") != "rank0" or pipe.ranks.world.rank == 0
    losses: list[Any] = []
    for record in pipe.train(batches if here else None):
        losses.append(record.loss)
        if record.index == 2:
            losses.append(pipe.evaluate(batches[:2] if here else None))
    marks = [mark(pipe)]
    done = pipe.step(*(batches[0] if here else (None, None)))
    losses += [done.loss, done.gradient_norm]
    path = f"{folder}/{name.replace(' ', '-')}"
    pipe.save(path)
    for record in pipe.train(batches if here else None):
        losses.append(record.loss)
        if len(losses) == 16:
            break
    marks.append(mark(pipe))
    pipe.load(path)
    for record in pipe.train(batches if here else None):
        losses.append(record.loss)
        if record.index == 14:
            pipe.switch("1f1b", microbatches=2)
        if record.index == 17:
            pipe.switch(schedule, microbatches=m)
    found = {"losses": losses, "marks": [*marks, mark(pipe)], "index": pipe.index}
    pipe.close()
    return found


def fail(how: str, rank: int) -> None:
    """A replica that raises or dies in mid-flight, or a loop that is left at different records."""
    pipe, batches = pipeline("turns")
    calls = []

    def failing(module: nn.Module, given: Any) -> None:
        calls.append(given)
        if len(calls) == 3 and how == "raise":
            raise ZeroDivisionError("no such luck")
        if len(calls) == 3:
            os.kill(os.getpid(), 9)

    if how in ("raise", "die") and rank == 1:
        pipe.model[0].register_forward_pre_hook(failing)
    for record in pipe.train(batches):
        if how == "leave" and record.index == 2 + 2 * (rank == 1):
            break
    pipe.close()


def main(file: str, how: str = "") -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    print(f"rank {rank} begins as {os.getpid()}", flush=True)
    if not how:
        folder = str(Path(file).parent)
        found = {name: run(name, folder) for name in cases(ranks)}
        Path(f"{file}.{rank}").write_text(json.dumps(found))
    else:
        fail(how, rank)


def inline(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run(name, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
