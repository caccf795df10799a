"""What the inline engine costs over a plain loop over micro-batches, in one run.

    python -m benchmarks.inline [--repetitions 9] [--only Llama]

One line a case: CPU seconds of a step of ours, of the peer (forward and backward of each micro-batch of the whole
model, then the optimizer), and their ratio beside the most it should be; the limit of all is 1.00: the same work and no
engine. One thread, float32, 4 micro-batches, interleaved in shuffled order. Each sample is taken right after a step
that is not measured, and the quarter of the rounds counts in which the system took the processor away least: medians
of their ratios. `naive` runs micro-batches in the order of the plain loop, so its ratio is the engine's own; other
schedules hold more activations, for which the allocator asks the system for pages, and zb-h1 computes input and weight
gradients apart. Steps are those of a loop over `pipe.train`; --steps takes single calls of `pipe.step`, each of which
begins and ends to watch the model's calls.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import resource
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.split_backward import Block
from penstock import Pipeline

PARTS, WORDS = 4, 512
METHODS = [(stages, method) for stages in (2, 4) for method in ("naive", "1f1b", "zb-h1")]


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


def transformers_llama(width, layers, length):
    """Likewise."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=length, use_cache=False))


def token_loss(result, target):
    logits = result if isinstance(result, torch.Tensor) else result.logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


def seconds(work):
    begin = time.process_time()
    work()
    return time.process_time() - begin


def sample(work):
    """CPU seconds, and how often the system took the processor away."""
    work()
    taken = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
    spent = seconds(work)
    return spent, resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw - taken


def rounds(work, repetitions):
    """The calmest quarter of some rounds: CPU seconds of everybody."""
    every = []
    for _ in range(repetitions):
        found = {who: sample(work[who]) for who in random.sample(sorted(work), len(work))}
        every.append((sum(taken for _, taken in found.values()), {who: spent for who, (spent, _) in found.items()}))
    return [spent for _, spent in sorted(every, key=lambda one: one[0])[: max(repetitions // 4, 5)]]


def case(name, model, sizes, most, repetitions, single):
    """One line of the table for each schedule."""
    width, layers, length, rows = sizes
    x, y = torch.randint(0, WORDS, (rows, length)), torch.randint(0, WORDS, (rows, length))
    options = {"example": x[:2], "microbatches": PARTS, "loss": token_loss, "optimizer": sgd}
    peer = copy.deepcopy(model)
    optimizer = sgd(peer.parameters())
    pipes = {
        f"{stages} stages {method}": Pipeline(copy.deepcopy(model), stages=stages, schedule=method, **options)
        for stages, method in METHODS
    }

    def plain():
        for part, target in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
            (token_loss(peer(part), target) / PARTS).backward()
        optimizer.step()
        optimizer.zero_grad()

    work = {"plain loop": plain}
    for who, pipe in pipes.items():
        steps = pipe.train(itertools.repeat((x, y)))
        work[who] = (lambda pipe=pipe: pipe.step(x, y)) if single else (lambda steps=steps: next(steps))
    for one in work.values():
        one()
    calm = rounds(work, repetitions)
    weights = dict(peer.named_parameters())
    limit = statistics.median(spent["plain loop"] for spent in calm)
    for who, pipe in pipes.items():
        for key, parameter in pipe.model.named_parameters():  # the same training, or the times mean nothing
            torch.testing.assert_close(parameter, weights[key], rtol=1e-3, atol=1e-4)
        ratio = statistics.median(spent[who] / spent["plain loop"] for spent in calm)
        print(
            f"{name:<22} d {width:<4} {layers:>2} layers  {who:<14}  ours {ratio * limit * 1e3:8.1f} ms   "
            f"plain loop {limit * 1e3:8.1f} ms   ratio {ratio:.3f}   wanted {most:.2f}   limit 1.00",
            flush=True,
        )


CASES = [  # model, (width, layers, length, rows), the most its ratio should be, how many times as many repetitions
    ("GPT-2 (transformers)", transformers_gpt2, (256, 8, 128, 8), 1.03, 1),
    ("GPT", GPT, (256, 8, 128, 8), 1.03, 1),
    ("Llama (transformers)", transformers_llama, (128, 4, 64, 8), 1.3, 10),
    ("Llama (transformers)", transformers_llama, (64, 8, 32, 8), 1.3, 10),
    ("Llama (transformers)", transformers_llama, (64, 4, 32, 8), 1.3, 10),
    ("Llama (transformers)", transformers_llama, (32, 4, 16, 8), 1.3, 10),
    ("GPT-2 (transformers)", transformers_gpt2, (32, 4, 16, 8), 1.3, 10),
    ("GPT", GPT, (32, 4, 16, 8), 1.3, 10),
]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repetitions", type=int, default=9)
    options.add_argument("--only", default="", help="cases whose name has this in it")
    options.add_argument("--steps", action="store_true", help="call pipe.step in place of a loop over pipe.train")
    asked = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, make, sizes, most, times in CASES:
        if asked.only in f"{name} d {sizes[0]}":
            model = make(*sizes[:3])
            if model is not None:
                case(name, model, sizes, most, asked.repetitions * times, asked.steps)


if __name__ == "__main__":
    main()
