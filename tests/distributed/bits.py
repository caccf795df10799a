"""Models that workers and the inline engine must train to the same bits, and what one run of them gives.

Run as a script, by every rank: python bits.py TRANSPORT FILE, which writes what rank 0 found for all cases.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.models.gpt import GPT

SCHEDULES = (
    "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "auto", "dapple-pa", "dapple-pb", "dualpipe-v",
    "dualpipe-v overlapped",
)  # fmt: skip
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "dapple-pa": ("dapple", {"policy": "pa"}),
    "dapple-pb": ("dapple", {"policy": "pb"}),
    "dualpipe-v": ("dualpipe-v", {"overlap": False}),
    "dualpipe-v overlapped": ("dualpipe-v", {"overlap": True}),
}
ROWS = 8


class UNet(nn.Module):
    """Skips that cross all stages between their ends."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 4, 5, 6, 8)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(2 * b, a, 3, padding=1) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = F.relu(down(x))
            skips.append(x)
            x = F.max_pool2d(x, 2, ceil_mode=True)
        x = self.middle(x)
        for up in reversed(self.up):
            skip = skips.pop()
            x = up(torch.cat([F.interpolate(x, skip.shape[-2:]), skip], 1))
        return x


def _normed() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*blocks)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _tokens(out: Any, target: Tensor) -> Tensor:
    scores = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def case(kind: str) -> tuple[nn.Module, list[tuple[Any, Any]], Any]:
    """A model, five batches and a loss, always the same."""
    torch.manual_seed(7)
    if kind == "gpt":
        model: nn.Module = GPT(vocab=32, width=16, heads=2, layers=8, length=8, dropout=0.1)
    else:
        model = {"unet": UNet, "normed": _normed, "llama": _llama}[kind]()
    if kind in ("gpt", "llama"):
        data: list[tuple[Any, Any]] = [
            (torch.randint(0, 32, (ROWS, 8)), torch.randint(0, 32, (ROWS, 8))) for _ in range(5)
        ]
        return model, data, _tokens
    shape = (ROWS, 3, 8, 8) if kind == "unet" else (2 * ROWS, 6)
    return model, [(torch.randn(shape), torch.randn(shape)) for _ in range(5)], F.mse_loss


KINDS = ("gpt", "unet", "normed", "llama")


def run(kind: str, name: str, ranks: int, transport: str | None = None) -> dict[str, Any]:
    """Five steps: the losses, and a fingerprint of everything that was trained."""
    model, data, loss = case(kind)
    parts = 2 * ranks if name.startswith("dualpipe") else 4 if ranks != 3 else 6
    method, options = OPTIONS.get(name, (name, {}))
    asked: Any = penstock.schedule(method, stages=ranks, microbatches=parts, **options) if options else name
    pipe = penstock.Pipeline(
        model, example=data[0][0][:2], stages=ranks, schedule=asked, microbatches=parts, loss=loss, clip=1.0,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), transport=transport, verify=False, timeout=60,
    )  # fmt: skip
    losses = [step.loss for step in pipe.train(data)]
    state = pipe.state_dict()
    pipe.close()
    mark = hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()
    return {"losses": losses, "mark": mark}


def main(transport: str, file: str) -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    found = {f"{kind} {name}": run(kind, name, ranks, transport) for kind in KINDS for name in SCHEDULES}
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
