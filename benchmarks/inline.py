"""What the inline engine costs over a plain loop over micro-batches, in one run.

    python -m benchmarks.inline [--repetitions 9]

One line a case: CPU seconds of a step of ours, of the peer (forward and backward of each micro-batch of the whole
model, then the optimizer), and their ratio beside the limit, 1.00: the same work and no engine. One thread, float32,
4 stages, 4 micro-batches, interleaved in shuffled order, medians. `naive` runs micro-batches in the order of the plain
loop, so its ratio is the engine's own; other schedules hold more activations, for which the allocator asks the system
for pages, and zb-h1 computes input and weight gradients apart.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.split_backward import Block
from penstock import Pipeline

STAGES, PARTS, WORDS = 4, 4, 512


class GPT(nn.Module):
    """GPT-2's shape: learnt positions, pre-norm blocks, a head tied to the token table."""

    def __init__(self, width, layers, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def transformers_gpt2(width, layers, length):
    """The library's own GPT-2 with random weights, or None where it is not installed."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return None
    settings = {"vocab_size": WORDS, "n_positions": length, "n_embd": width, "n_layer": layers, "n_head": 8}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**settings, **off, **ends))


def token_loss(result, target):
    logits = result if isinstance(result, torch.Tensor) else result.logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


def seconds(work):
    begin = time.process_time()
    work()
    return time.process_time() - begin


def case(name, model, width, layers, length, rows, methods, repetitions):
    """One line of the table for each schedule."""
    x, y = torch.randint(0, WORDS, (rows, length)), torch.randint(0, WORDS, (rows, length))
    options = {"example": x[:2], "stages": STAGES, "microbatches": PARTS, "loss": token_loss, "optimizer": sgd}
    peer = copy.deepcopy(model)
    optimizer = sgd(peer.parameters())
    pipes = {method: Pipeline(copy.deepcopy(model), schedule=method, **options) for method in methods}

    def plain():
        for part, target in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
            (token_loss(peer(part), target) / PARTS).backward()
        optimizer.step()
        optimizer.zero_grad()

    work = {method: lambda pipe=pipe: pipe.step(x, y) for method, pipe in pipes.items()} | {"plain loop": plain}
    spent = {who: [] for who in work}
    for one in work.values():
        one()
    for _ in range(repetitions):
        for who in random.sample(sorted(work), len(work)):
            spent[who].append(seconds(work[who]))
    weights = dict(peer.named_parameters())
    medians = {who: statistics.median(found) for who, found in spent.items()}
    limit = medians["plain loop"]
    for method, pipe in pipes.items():
        for key, parameter in pipe.model.named_parameters():  # the same training, or the times mean nothing
            torch.testing.assert_close(parameter, weights[key], rtol=1e-3, atol=1e-4)
        print(
            f"{name:<22} d {width:<4} {layers:>2} layers  {method:<6}  ours {medians[method] * 1e3:8.1f} ms   "
            f"plain loop {limit * 1e3:8.1f} ms   ratio {medians[method] / limit:.3f}   limit 1.00"
        )


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repetitions", type=int, default=9)
    repetitions = options.parse_args().repetitions
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for width, layers, length, rows, times in ((256, 24, 128, 8, 1), (32, 4, 16, 8, 10)):
        models = {"GPT": GPT(width, layers, length), "GPT-2 (transformers)": transformers_gpt2(width, layers, length)}
        for name, model in models.items():
            if model is not None:
                case(name, model, width, layers, length, rows, ("naive", "1f1b", "zb-h1"), repetitions * times)


if __name__ == "__main__":
    main()
