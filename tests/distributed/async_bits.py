"""Training without a flush that workers and the inline engine must do to the same bits, and what one run of it gives.

Run as a script, by every rank: python async_bits.py FILE HOW, which writes what rank 0 found for all cases; then, where
HOW is given, one rank does what it should not.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
import recursion_models
from penstock.models.gpt import GPT

Case = tuple[str, str, int, dict[str, Any]]  # kind of model, schedule, micro-batches (0: as many as stages), options
CASES: dict[str, Case] = {
    "stash": ("tied gpt", "pipedream", 1, {}),
    "stash with micro-batches, clipped": ("conv", "pipedream", 3, {"clip": 0.3}),
    "vertical sync": ("chain", "pipedream", 1, {"vertical_sync": True}),
    "no stash": ("tied gpt", "pipedream", 2, {"stash": False}),
    "2bw, clipped": ("tied gpt", "2bw", 0, {"clip": 0.3}),
    "2bw, clipped, with skips": ("unet", "2bw", 4, {"clip": 0.3}),
    "stash with skips": ("unet", "pipedream", 1, {"recompute": "always"}),
    "pipemare": ("tied gpt", "pipemare", 1, {}),
    "pipemare t1": ("conv", "pipemare", 2, {"t1": 6}),
    "pipemare t1 and t3, clipped": ("chain", "pipemare", 1, {"t1": 4, "t3": 3, "clip": 0.2}),
    "2bw with xpipe": ("chain", "2bw", 0, {"predict": "xpipe", "clip": 0.5}),
    "xpipe of a tied weight": ("tied gpt", "pipemare", 1, {"predict": "xpipe"}),
    "spectrain": ("conv", "pipedream", 1, {"predict": "spectrain"}),
    "dropout in bf16": ("dropout", "pipemare", 1, {"precision": "bf16"}),
    "2bw in fp16": ("dropout", "2bw", 4, {"precision": "fp16", "clip": 1.0}),
    "batch norm": ("normed", "pipedream", 2, {}),
    "data on rank 0": ("chain", "pipedream", 1, {"data": "rank0"}),
}
DEEP = ("vertical sync", "2bw, clipped, with skips", "2bw, clipped", "pipemare", "xpipe of a tied weight")
GLOO = ("stash", "2bw, clipped", "xpipe of a tied weight", "stash with skips")


def cases(ranks: int) -> list[tuple[str, str]]:
    """By name and transport."""
    named = [(name, "shared") for name in (CASES if ranks == 2 else DEEP)]
    return [*named, *((name, "gloo") for name in GLOO)] if ranks == 2 else named


class UNet(nn.Module):
    """Skips that cross all stages between their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = torch.tanh(down(x))
            skips.append(x)
        for up in self.up:
            x = torch.tanh(up(torch.cat([x, skips.pop()], 1)))
        return x


def model_of(kind: str, ranks: int) -> tuple[nn.Module, Callable[..., Any], list[tuple[Any, Any]], list[str] | None]:
    """A model, its loss, eight batches and where it is cut."""
    if kind in ("chain", "conv", "tied gpt"):
        made = {
            "chain": lambda: recursion_models.chain(ranks, layers=4, width=3, tied=(0, 2)),
            "conv": lambda: recursion_models.conv_net(ranks, layers=4, channels=2, side=3),
            "tied gpt": lambda: recursion_models.gpt(ranks, layers=4, width=4, length=3),
        }[kind]()
        return made.module, made.loss, made.batches(8, rows=4), [str(at) for at in range(1, ranks)]
    torch.manual_seed(3)
    if kind == "dropout":
        ids = [torch.randint(0, 16, (4, 4)) for _ in range(8)]
        loss = lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten())  # noqa: E731
        return GPT(vocab=16, width=8, heads=2, layers=2, length=4, dropout=0.2), loss, [(x, x) for x in ids], None
    model: nn.Module = UNet()
    if kind == "normed":
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(4)))
    return model, F.mse_loss, [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(8)], None


def mark(pipe: penstock.Pipeline) -> str:
    state = pipe.state_dict()
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()


def run(name: str, ranks: int, transport: str | None = None) -> dict[str, Any]:
    """A loop with an evaluation in it, one that is left early, single steps, and a switch in a loop, there and back."""
    kind, schedule, m, options = CASES[name]
    model, loss, batches, cuts = model_of(kind, ranks)
    if kind != "normed":  # fewer rows than some have micro-batches; a norm wants more than one in each
        batches[4] = tuple(part[:1] for part in batches[4])
    m, method = m or ranks, {k: v for k, v in options.items() if k in ("stash", "vertical_sync", "t1", "predict")}
    pipe = penstock.Pipeline(
        model, example=batches[0][0][:2], stages=ranks, cuts=cuts, schedule=schedule, microbatches=m, loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), transport=transport, verify=False, timeout=60,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95), **options,
    )  # fmt: skip
    here = options.get("data") != "rank0" or pipe.ranks.world.rank == 0
    losses: list[Any] = []
    for record in pipe.train(batches if here else None):
        losses.append(record.loss)
        if record.index == 2:
            losses.append(pipe.evaluate(batches[:2] if here else None))
        if record.index == 4:
            break
    done = pipe.step(*(batches[0] if here else (None, None)))
    losses += [done.loss, done.gradient_norm, mark(pipe)]
    for record in pipe.train(batches if here else None):
        losses.append(record.loss)
        if len(losses) == 11:
            pipe.switch("1f1b", microbatches=2)
        if len(losses) == 14:
            pipe.switch(schedule, microbatches=m, **method)
    found = {"losses": losses, "mark": mark(pipe), "index": pipe.index, "scale": pipe.optimizers.scale}
    pipe.close()
    return found


def fail(how: str, rank: int, ranks: int) -> None:
    """A stage that raises in mid-flight, or a loop that is left at different records."""
    model, loss, batches, cuts = model_of("chain", ranks)
    pipe = penstock.Pipeline(
        model, example=batches[0][0][:2], stages=ranks, cuts=cuts, schedule="pipedream", microbatches=1, loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1), verify=False,
        timeout=5 if how in ("leave", "raise") else 90, data="rank0" if how.startswith("alone") else "every",
    )  # fmt: skip
    calls = []

    def raising(module: nn.Module, given: Any) -> None:
        calls.append(given)
        if len(calls) == 6 and how.startswith("exit"):
            sys.exit(int(how.split()[1]))
        if len(calls) == 6:
            raise ZeroDivisionError("no such luck")

    if how.startswith(("raise", "exit")) and rank == 1:
        model[1].register_forward_pre_hook(raising)
    for record in pipe.train(None if how.startswith("alone") and rank else batches):
        if how == f"alone {rank}" and record.index == 2:
            break
        if how == "leave" and record.index == 2 + rank:  # the second rank goes on for one more
            break
        if how == "early" and rank == 1 and record.index == 2:
            break
        if how == "throw" and rank == 0 and record.index == 2:
            raise KeyError("in the body")
    pipe.close()


def main(file: str, how: str = "") -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    print(f"rank {rank} begins as {os.getpid()}", flush=True)
    every = cases(ranks) if how in ("", "leave", "raise") else []
    found = {f"{transport}: {name}": run(name, ranks, transport) for name, transport in every}
    if rank == 0:
        Path(file).write_text(json.dumps(found))
    if how:
        fail(how, rank, ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
