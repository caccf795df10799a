"""Models that workers and the inline engine must train to the same bits, and what one run of them gives.

Run as a script, by every rank: python bits.py KIND FILE, which writes what rank 0 found over each transport.
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
from guard_models import UNet
from penstock.models.gpt import GPT

SCHEDULES = (  # those in a row place their stages alike: a pipeline can go on by the next one
    ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "auto", "dapple-pa", "dapple-pb"),
    ("interleaved",),
    ("zb-v", "dualpipe-v", "dualpipe-v overlapped"),
)
TRANSPORTS = ("shared", "gloo")
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "dapple-pa": ("dapple", {"policy": "pa"}),
    "dapple-pb": ("dapple", {"policy": "pb"}),
    "dualpipe-v": ("dualpipe-v", {"overlap": False}),
    "dualpipe-v overlapped": ("dualpipe-v", {"overlap": True}),
}
ROWS = 8


def _normed(blocks: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(blocks)))


def _llama(blocks: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=blocks, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _tokens(out: Any, target: Tensor) -> Tensor:
    scores = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def case(kind: str, ranks: int) -> tuple[nn.Module, list[tuple[Any, Any]], Any]:
    """A model with a block for each of two chunks a rank, five batches and a loss, always the same."""
    torch.manual_seed(7)
    made: dict[str, Callable[[], nn.Module]] = {
        "gpt": lambda: GPT(vocab=32, width=16, heads=2, layers=2 * ranks, length=8, dropout=0.1),
        "unet": lambda: UNet(ranks),
        "normed": lambda: _normed(2 * ranks),
        "llama": lambda: _llama(2 * ranks),
    }
    model = made[kind]()
    if kind in ("gpt", "llama"):
        data: list[tuple[Any, Any]] = [
            (torch.randint(0, 32, (ROWS, 8)), torch.randint(0, 32, (ROWS, 8))) for _ in range(5)
        ]
        return model, data, _tokens
    shape = (ROWS, 3, 8, 8) if kind == "unet" else (2 * ROWS, 6)
    return model, [(torch.randn(shape), torch.randn(shape)) for _ in range(5)], F.mse_loss


KINDS = ("gpt", "unet", "normed", "llama")


def asked(name: str, ranks: int) -> tuple[Any, int]:
    """A schedule and its number of micro-batches."""
    parts = 2 * ranks if name.startswith("dualpipe") else 4 if ranks != 3 else 6
    method, options = OPTIONS.get(name, (name, {}))
    return penstock.schedule(method, stages=ranks, microbatches=parts, **options) if options else name, parts


def run(kind: str, ranks: int, transport: str | None = None) -> dict[str, Any]:
    """Five steps by every schedule. The BatchNorm net has a pipeline for each; the others, whose pipelines take longer
    to make, one for each row of schedules, which goes on from one to the next."""
    rows = SCHEDULES if kind != "normed" else [(name,) for row in SCHEDULES for name in row]
    return {name: found for row in rows for name, found in _row(kind, row, ranks, transport).items()}


def _row(kind: str, names: tuple[str, ...], ranks: int, transport: str | None) -> dict[str, Any]:
    """By schedule: the losses, and a fingerprint of everything that was trained."""
    model, data, loss = case(kind, ranks)
    if kind != "normed":  # a norm wants more rows than one in a micro-batch
        data[3] = tuple(part[:3] for part in data[3])
    schedule, parts = asked(names[0], ranks)
    pipe = penstock.Pipeline(
        model, example=data[0][0][:2], stages=ranks, schedule=schedule, microbatches=parts, loss=loss, clip=1.0,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), transport=transport, verify=False, timeout=60,
    )  # fmt: skip
    found = {}
    for name in names:
        if name != names[0]:
            schedule, parts = asked(name, ranks)
            pipe.switch(schedule, microbatches=parts)
        losses = [step.loss for step in pipe.train(data)]
        state = pipe.state_dict()
        mark = hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()
        found[name] = {"losses": losses, "mark": mark}
    pipe.close()
    return found


def main(kind: str, file: str) -> None:
    torch.set_num_threads(1)
    found = {transport: run(kind, int(os.environ["WORLD_SIZE"]), transport) for transport in TRANSPORTS}
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
