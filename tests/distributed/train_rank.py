"""A rank that trains a small GPT for a number of steps, and does one odd thing where it is told to.

python train_rank.py '{"steps": 3, "who": 1, "odd": "raise", ...}'
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.comm.watch.status import PageField
from penstock.models.gpt import GPT

torch.set_num_threads(1)
RANK = int(os.environ.get("RANK", "0"))


class Odd(nn.Module):
    """A layer of the user's in which something happens, at some call on some rank."""

    def __init__(self, inner: nn.Module, what: str, call: int) -> None:
        super().__init__()
        self.inner, self.what, self.left = inner, what, call

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and self.armed:
            self.left -= 1
            if self.left == 0:
                act(self.what)
        return self.inner(x)

    armed = False


def act(what: str) -> None:
    if what == "raise":
        raise ValueError("no such luck")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "slow":
        time.sleep(1)


def loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def meetings(pipe: penstock.Pipeline) -> int:
    """Of all ranks so far."""
    watch = getattr(pipe.ranks.world, "watch", None)
    return 0 if watch is None else int(watch.status_page.fields[PageField.COLLECTIVES])


def main(asked: dict[str, Any]) -> None:
    mine = asked.get("who", -1) == RANK
    odd = asked.get("odd", "")
    stages, parts = asked.get("stages", int(os.environ.get("WORLD_SIZE", "2"))), asked.get("microbatches", 4)
    torch.manual_seed(RANK if odd == "seed" and mine else 3)
    model = GPT(vocab=32, width=24 if odd == "model" and mine else 16, heads=2, layers=4, length=8, dropout=0.1)
    for at in range(4):
        model.blocks[at] = Odd(model.blocks[at], odd, asked.get("call", 3))
    draw = torch.Generator().manual_seed(5)
    batches = [
        (torch.randint(0, 32, (8, 8), generator=draw), torch.randint(0, 32, (8, 8), generator=draw))
    ] * asked.get("steps", 3)
    if odd == "data" and mine:
        batches = [(x.flip(0), y) for x, y in batches]
    given: Any = batches
    if asked.get("data") == "rank0" and RANK:
        given = None
    pipe = penstock.Pipeline(
        model, example=batches[0][0][:2], stages=stages, microbatches=parts, loss=loss,
        schedule="gpipe" if odd == "schedule" and mine else asked.get("schedule", "1f1b"),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), transport=asked.get("transport"),
        timeout=asked.get("timeout", 60), data=asked.get("data", "every"), verify=asked.get("verify", False),
        replicas=asked.get("replicas"),
    )  # fmt: skip
    Odd.armed = mine or asked.get("who") == -2
    print(f"rank {RANK} begins as {os.getpid()}", flush=True)
    losses, met = [], []
    for step in pipe.train(given):
        losses.append(step.loss)
        met.append(meetings(pipe))
    if asked.get("file"):
        state = pipe.state_dict()
        mark = hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()
        kinds = sorted(set(getattr(pipe.context.lanes, "kinds", {}).values()))
        found = {"losses": losses, "mark": mark, "kinds": kinds, "met": met[-1] - met[0]}
        Path(f"{asked['file']}.{RANK}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
