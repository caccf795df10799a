"""What stages with replicas train to, on ranks and in one process; run as a script by every rank.

python replica_bits.py bits OUT NAME...      some of CASES
python replica_bits.py measured OUT          how long sleeping stages took
python replica_bits.py odd OUT NAME          one of ODD, each of which is to be refused
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import bits
import torch
from timeline_rank import Sleeper, sgd
from torch import nn

import penstock
from checkpoints import state
from penstock import InputError, SplitError

RANK = int(os.environ.get("RANK", "0"))
CASES: dict[str, tuple[str, list[int], list[str], dict[str, Any]]] = {  # model, replicas, schedules, options
    "gpt 2": ("gpt", [2], ["1f1b", "gpipe"], {"clip": 0.1}),
    "normed 2": ("normed", [2], ["1f1b"], {}),
    "gpt 2:1": ("gpt", [2, 1], ["zb-h1", "gpipe", "1f1b"], {"clip": 0.1}),
    "normed 2:1": ("normed", [2, 1], ["1f1b"], {}),
    "gpt2 2:1": ("gpt2", [2, 1], ["gpipe"], {"recompute": "always"}),
    "llama 1:2": ("llama", [1, 2], ["1f1b"], {"accumulate": 2}),
    "gpt 1:3": ("gpt", [1, 3], ["1f1b"], {"transport": "gloo", "microbatches": 2}),  # rows for all three
    "normed 2:2": ("normed", [2, 2], ["interleaved"], {}),
    "unet 2:1:1": ("unet", [2, 1, 1], ["zb-h1"], {"microbatches": 6}),
    "gpt 2:2": ("gpt", [2, 2], ["zb-v"], {}),
}


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=4, n_head=2, n_positions=8, use_cache=False))


def case(kind: str, replicas: list[int]) -> tuple[nn.Module, list[Any], Any]:
    model, data, loss = bits.case("gpt" if kind == "gpt2" else kind, len(replicas) if len(replicas) > 1 else 2)
    if kind != "normed":  # a norm wants more rows than one
        data[3] = tuple(part[:3] for part in data[3])
    return (_gpt2() if kind == "gpt2" else model), data, loss


def run(name: str) -> dict[str, Any]:
    """Losses, results, and a fingerprint of everything that was trained here."""
    kind, replicas, schedules, options = CASES[name]
    model, data, loss = case(kind, replicas)
    asked = {"microbatches": 4, "verify": False, "timeout": 60, **options}
    if "WORLD_SIZE" not in os.environ:
        asked.pop("transport", None)
    pipe = penstock.Pipeline(
        model, example=data[0][0][:2], stages=len(replicas), replicas=replicas, schedule=schedules[0], loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), **asked,
    )  # fmt: skip
    losses = []
    for schedule in schedules:
        if schedule != schedules[0]:
            pipe.switch(schedule)
        losses += [step.loss for step in pipe.train(data)]
    losses.append(pipe.evaluate(data[:2]))
    pipe.model.eval()
    result = pipe.forward(data[0][0])
    pipe.model.train()
    rows = [pipe.schedule.shape.replicas, len(pipe.timeline().start)]
    marks = {key: _mark(value) for key, value in state(pipe).items()}
    found = {"losses": losses, "result": _mark(result if isinstance(result, torch.Tensor) else result.logits)}
    found |= {"rows": rows, "state": marks, "weights": {key: _mark(t) for key, t in pipe.state_dict().items()}}
    pipe.close()
    return json.loads(json.dumps(found))


def _mark(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()


def measured() -> dict[str, Any]:
    """Sleeping stages, the first on two ranks: what was measured, and what earlier steps predict."""
    torch.manual_seed(0)
    x, found = torch.randn(12, 16), {}
    for schedule in ("1f1b", "zb-h1"):
        pipe = penstock.Pipeline(
            nn.Sequential(Sleeper(), Sleeper()), example=x[:4], stages=2, replicas=[2, 1], schedule=schedule,
            microbatches=4, loss=nn.functional.mse_loss, optimizer=sgd,
        )  # fmt: skip
        for _ in range(6):
            pipe.step(x, x)
        told = pipe.measured()
        found[schedule] = {
            "measured": [told.timeline(step).to_json() for step in range(6)],
            "predicted": told.predicted().to_json(),
            "last": pipe.timeline().to_json(),
            "memory": [vars(one) for one in told.memory()],
        }
    return found


class Failing(nn.Module):
    """A layer that fails at some forward of one rank."""

    armed = False

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.left = nn.Linear(6, 6), 5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Failing.armed and torch.is_grad_enabled():
            self.left -= 1
            if not self.left:
                raise ValueError("no such luck")
        return torch.tanh(self.layer(x))


def odd(name: str) -> None:
    """Build, and train for one step, what is to be refused."""
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    model = nn.Sequential(*(Failing() for _ in range(4)))
    asked: dict[str, Any] = {"stages": 2, "replicas": [2, 1], "example": x[:4]}
    if name == "world":
        asked["replicas"] = [2, 3]
    elif name == "unequal":
        asked["replicas"] = [2, 1] if RANK else [1, 2]
    elif name == "data" and RANK == 1:
        x = x.flip(0)
    elif name == "few rows":
        x = x[:1]
    elif name == "counts":
        asked["replicas"] = [3]
    elif name == "sparse":
        model[0] = nn.Embedding(9, 6, sparse=True)
        x = torch.randint(0, 9, (8, 6))
        asked["example"] = x[:4]
    elif name == "sparse function":
        model[0] = Sparse()
        x = torch.randint(0, 9, (8, 6))
        asked["example"] = x[:4]
    pipe = penstock.Pipeline(
        model, loss=lambda out, _: out.square().mean(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        timeout=30, **asked,
    )  # fmt: skip
    if name == "exception":
        Failing.armed = RANK == 1
    for _ in range(3):
        pipe.step(x)


class Sparse(nn.Module):
    """A sparse gradient that no module tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.table, sparse=True)


def main(what: str, out: str, *names: str) -> None:
    torch.set_num_threads(1)
    print(f"rank {RANK} begins as {os.getpid()}", flush=True)
    if what == "measured":
        Path(f"{out}.{RANK}").write_text(json.dumps(measured()))
    elif what == "bits":
        Path(f"{out}.{RANK}").write_text(json.dumps({name: run(name) for name in names}))
    else:
        try:
            odd(names[0])
        except (InputError, SplitError) as error:
            Path(f"{out}.{RANK}").write_text(str(error))
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
