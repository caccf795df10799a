"""A small GPT on the manual's pages that ship with Python, as a pipeline of two stages.

    python examples/train_gpt.py                                     # both stages in this process
    torchrun --nproc-per-node 2 examples/train_gpt.py                # the same script, one process a stage

It ends with the loss on held-out text. A number as argument sets the steps.
"""

from __future__ import annotations

import os
import sys
from itertools import islice
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor

import penstock
from penstock.app.config.data import TextData
from penstock.models.gpt import GPT


def token_loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def main(steps: int) -> None:
    torch.manual_seed(0)
    text = TextData("".join(topics.values()), rows=32, length=64, validation=0.05)
    model = GPT(vocab=len(text.alphabet), width=128, heads=4, layers=6, length=64)
    pipe = penstock.Pipeline(
        model,
        example=text.batch(0)[0][:4],
        stages=2,
        schedule="1f1b",
        microbatches=8,
        loss=token_loss,
        optimizer=penstock.muon(lr=1e-2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    )
    first = os.environ.get("RANK", "0") == "0"
    for step in pipe.train(islice(text.batches(), steps)):
        if first:
            print(step.index, f"{step.loss:.4f}", flush=True)
    held_out = pipe.evaluate(text.validation())
    if first:
        print(f"validation loss {held_out:.4f}, unigram entropy {text.unigram_entropy():.4f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 280)
