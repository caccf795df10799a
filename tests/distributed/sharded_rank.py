"""Train with state divided between replicas, and beside it in plain torch; run by every rank: FILE.

Rank 0 writes how far the weights of each case are from plain training, and what checkpoints gave.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock

WORDS, WIDTH, STEPS = 13, 6, 5
ADAMW = {"adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)}
OPTIMIZERS: dict[str, Any] = ADAMW | {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "matrices decay": lambda parameters: torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    ),
}
CASES: list[dict[str, Any]] = [
    {"replicas": replicas, "shard": shard, "schedule": schedule, **more}
    for replicas in ([2, 1], [1, 2], [3])
    for shard in ("optimizer", "gradients")
    for schedule, more in (
        ("1f1b", {}),
        ("zb-h1", {"clip": 0.05}),
        ("gpipe", {"recompute": "always", "optimizer": "momentum"}),
        ("1f1b", {"accumulate": 2, "optimizer": "matrices decay"}),
    )
] + [
    {"replicas": [2, 1], "shard": "gradients", "schedule": "interleaved", "chunks": 2},
    {"replicas": [2, 1], "shard": "optimizer", "schedule": "zb-v"},
    {"replicas": [2, 1], "shard": "optimizer", "schedule": "1f1b", "held": 0.02},
    {"replicas": [3], "shard": "gradients", "schedule": "1f1b", "held": 0.02},
]


class Tied(nn.Module):
    """Words in and out by one matrix; one weight is a single number, which cannot be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.idle = nn.Linear(WIDTH, 2)  # without gradients

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) * self.factor
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def loss(result: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(result.flatten(0, 1), target.flatten(), ignore_index=0)


def batches() -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(3)
    words = [torch.randint(0, WORDS, (rows, 5), generator=draws) for rows in (8, 8, 5, 8, 8, 8)]
    return [(part, part) for part in words]


def hold(model: nn.Module, case: dict[str, Any]) -> None:
    """Leave gradients of the user's own in `.grad`, as a regulariser taken outside the step does."""
    for parameter in model.parameters() if "held" in case else ():
        if not parameter.is_meta:
            parameter.grad = torch.full_like(parameter, case["held"])


def plain(model: nn.Module, case: dict[str, Any]) -> dict[str, Tensor]:
    optimizer = OPTIMIZERS[case.get("optimizer", "adamw")](list(model.parameters()))
    accumulate = case.get("accumulate", 1)
    every = batches()[: STEPS + 1 if accumulate > 1 else STEPS]
    for at in range(0, len(every) - len(every) % accumulate, accumulate):
        optimizer.zero_grad()
        if not at:
            hold(model, case)
        group = every[at : at + accumulate]
        sums = [F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=0, reduction="sum") for x, y in group]
        (sum(sums) / sum(float((y != 0).sum()) for _, y in group)).backward()  # on top of what is held
        if "clip" in case:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
        optimizer.step()
    return model.state_dict()


def pipeline(model: nn.Module, case: dict[str, Any], **changed: Any) -> penstock.Pipeline:
    asked = {
        name: value
        for name, value in (case | changed).items()
        if name not in ("optimizer", "held") and value is not None
    }
    example = torch.arange(20).view(4, 5) % WORDS
    return penstock.Pipeline(
        model, example=example, stages=len(case["replicas"]), microbatches=4, loss=loss,
        optimizer=OPTIMIZERS[case.get("optimizer", "adamw")], **asked,
    )  # fmt: skip


def trained(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Tied()
    wanted = plain(copy.deepcopy(model), case)
    pipe = pipeline(copy.deepcopy(model), case)
    every = batches()[: STEPS + 1 if case.get("accumulate", 1) > 1 else STEPS]
    hold(pipe.model, case)
    for _ in pipe.train(every):
        pass
    state = pipe.state_dict()
    found: dict[str, Any] = {"case": case, "off": max(float((state[n] - wanted[n]).abs().max()) for n in wanted)}
    shards = [parameter for owned in pipe.optimizers.owned.values() for parameter in owned]
    kept = [v for o in pipe.optimizers.optimizers.values() for one in o.state.values() for v in one.values()]
    found["stepped"] = sum(shard.numel() for shard in shards)
    found["whole"] = sum(p.numel() for at in pipe.ranks.here for p in pipe.split.parameters(at).values())
    found["kept"] = sum(value.numel() for value in kept if value.dim())
    path = folder / f"{len(list(folder.iterdir()))}"
    pipe.save(path)
    nexts = []
    for again in (pipe, *(pipeline(copy.deepcopy(model), case, shard=shard) for shard in (None, "optimizer"))):
        if again is not pipe:
            again.load(path)
        nexts.append([again.step(*batch).loss for batch in batches()[:4]])
    found["nexts"] = nexts
    return found


def main(file: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    path = Path(file)
    results = [trained(case, path.parent / "saved") for case in CASES]
    rank = int(__import__("os").environ["RANK"])
    path.with_suffix(f".{rank}").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
