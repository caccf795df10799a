"""What every rank of a pipeline without a flush runs, and what the inline engine is held against.

As a script: python async_rank.py TRANSPORT FILE, which writes what rank 0 found for all cases; or, with words that name
something odd to do, what happens then.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor, nn

import recursion_models as models
from penstock import Pipeline

METHODS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "stash": ("pipedream", 1, {}),
    "stash, several micro-batches": ("pipedream", 2, {}),
    "vertical": ("pipedream", 1, {"vertical_sync": True}),
    "no stash": ("pipedream", 1, {"stash": False}),
    "clipped": ("pipedream", 1, {"clip": 0.3}),
    "2bw": ("2bw", 4, {}),
    "2bw clipped": ("2bw", 4, {"clip": 0.3}),
    "pipemare": ("pipemare", 1, {"t1": 4}),
    "pipemare, recomputed": ("pipemare", 2, {"recompute": "always"}),
    "forecast": ("pipedream", 1, {"predict": "xpipe"}),
    "2bw forecast": ("2bw", 4, {"predict": "xpipe", "clip": 0.3}),
    "synchronous at first": ("pipemare", 1, {"t3": 3, "clip": 0.3}),
    "bf16": ("2bw", 4, {"precision": "bf16"}),
}
KINDS = {
    "gpt": lambda ranks: models.gpt(ranks),
    "conv": lambda ranks: models.conv_net(ranks),
    "tied": lambda ranks: models.chain(ranks, layers=2 * ranks, tied=(0, 2)),
}


def made(kind: str, name: str, ranks: int, transport: str | None, **more: Any) -> tuple[Pipeline, list[Any]]:
    model, (schedule, parts, options) = KINDS[kind](ranks), METHODS[name]
    batches = model.batches(12, 8)
    if options.get("precision"):
        model.module.float()
        batches = [tuple(t.float() if t.is_floating_point() else t for t in batch) for batch in batches]
    pipe = Pipeline(
        model.module, example=batches[0][0][:2], stages=ranks, cuts=[str(i) for i in range(1, ranks)],
        schedule=schedule, microbatches=parts, loss=more.pop("loss", model.loss), verify=False, transport=transport,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01), **options, **({"timeout": 30} | more),
    )  # fmt: skip
    return pipe, batches


def run(kind: str, name: str, ranks: int, transport: str | None = None) -> dict[str, Any]:
    """A run to its end, one with an evaluation inside, one that is left early, and synchronous steps after a switch."""
    pipe, batches = made(kind, name, ranks, transport)
    losses = [step.loss for step in pipe.train(batches[:4])]
    for number, step in enumerate(pipe.train(batches[4:8])):
        losses.append(step.loss)
        if number == 1:
            losses.append(pipe.evaluate(batches[:2]))
    for step in pipe.train(batches[8:]):
        losses.append(step.loss)
        break
    pipe.switch("1f1b", microbatches=4)
    losses.append(pipe.step(*batches[0]).loss)
    state, index = pipe.state_dict(), pipe.index
    pipe.close()
    mark = hashlib.sha256(b"".join(t.float().numpy().tobytes() for t in state.values())).hexdigest()
    return {"losses": losses, "mark": mark, "index": index}


class Raising(nn.Module):
    """A layer that gives up at one of its calls."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.left = call

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise ValueError("no such luck")
        return x


def raising(ranks: int) -> None:
    """In the midst of things, on the second stage."""
    blocks: list[nn.Module] = [nn.Linear(4, 4) for _ in range(ranks)]
    blocks[1] = nn.Sequential(blocks[1], Raising(30))
    pipe = Pipeline(
        nn.Sequential(*blocks), example=torch.zeros(2, 4), cuts=["1", "2"], schedule="pipedream", microbatches=1,
        loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), verify=False,
    )  # fmt: skip
    for _ in pipe.train([(torch.zeros(2, 4), torch.zeros(2, 4))] * 60):
        pass


def leaving(ranks: int) -> None:
    """Rank 1 leaves its loop one record after the others."""
    pipe, batches = made("conv", "stash", ranks, None, timeout=5)
    for number, _ in enumerate(pipe.train(batches)):
        if number == 2 + int(os.environ["RANK"] == "1"):
            break
    pipe.state_dict()


def main(transport: str, file: str = "") -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    if transport in ("raising", "leaving"):
        return {"raising": raising, "leaving": leaving}[transport](ranks)
    found = {f"{kind}: {name}": run(kind, name, ranks, transport) for kind in KINDS for name in METHODS}
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps(found))
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
