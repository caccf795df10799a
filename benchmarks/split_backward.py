"""What it costs to compute input and weight gradients apart: ours, two peers and the limit, in one run.

    python -m benchmarks.split_backward [--device cuda] [--width 512] [--sequence 128] [--channels 64]

One line a case: seconds of the input gradient and of the weight gradients after it, over those of one plain backward.
The limit is 1.00: the same work, cut in two. Peers: `torch.distributed.pipelining`'s own two functions, and
`autograd.grad` twice over a kept graph. The forward's cost is shown for ours over a plain one. One thread, float32,
CPU seconds (on a GPU: elapsed, synchronised), interleaved in shuffled order, ratios of medians. All must agree on the
gradients.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from torch import nn

from penstock.model.split_backward import WeightQueue, deferring


class Block(nn.Module):
    """A pre-norm Transformer block, as in GPT-2."""

    def __init__(self, d, heads=8):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Residual(nn.Module):
    """A basic ResNet block."""

    def __init__(self, c):
        super().__init__()
        self.c1, self.c2 = (nn.Conv2d(c, c, 3, padding=1, bias=False) for _ in range(2))
        self.n1, self.n2 = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(self, x):
        return torch.relu(self.n2(self.c2(torch.relu(self.n1(self.c1(x))))) + x)


def now(x):
    """CPU seconds; where they mean nothing, seconds, when the device is done."""
    if not x.is_cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def plain(model, x, g):
    begin = now(x)
    y = model(x)
    forward = now(x)
    y.backward(g)
    return forward - begin, now(x) - forward, 0.0


def ours(model, x, g):
    begin = now(x)
    queue = WeightQueue()
    with deferring(queue):
        y = model(x)
    forward = now(x)
    with deferring(queue):
        y.backward(g)
    middle = now(x)
    queue.run()
    return forward - begin, middle - forward, now(x) - middle


def pipelining(model, x, g):
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    begin = now(x)
    y = model(x)
    forward = now(x)
    gradients, groups = stage_backward_input([y], [g], [x], model.parameters())
    middle = now(x)
    stage_backward_weight(model.parameters(), groups)
    x.grad = gradients[0]
    return forward - begin, middle - forward, now(x) - middle


def twice(model, x, g):
    begin = now(x)
    y = model(x)
    forward = now(x)
    (x.grad,) = torch.autograd.grad(y, x, g, retain_graph=True)
    middle = now(x)
    for p, gradient in zip(model.parameters(), torch.autograd.grad(y, list(model.parameters()), g), strict=True):
        p.grad = gradient
    return forward - begin, middle - forward, now(x) - middle


WAYS = {"plain": plain, "ours": ours, "pipelining": pipelining, "autograd.grad twice": twice}


def case(name, model, x, repetitions):
    g = torch.randn_like(model(x))
    spent = {way: [] for way in WAYS}
    expected, dice = None, random.Random(0)
    for turn in range(repetitions + 1):
        for way in dice.sample(list(WAYS), len(WAYS)):  # what ran before leaves its mark on caches and allocator
            model.zero_grad()
            x.grad = None
            seconds = WAYS[way](model, x, g)
            if turn:
                spent[way].append(seconds)
                continue
            found = [x.grad, *(p.grad for p in model.parameters())]
            expected = expected or found
            torch.testing.assert_close(found, expected)
    median = {way: [statistics.median(part) for part in zip(*spent[way], strict=True)] for way in WAYS}
    whole = median["plain"][1]
    parts = [f"{name:<18} B {1e3 * whole:8.2f} ms   I + W over B:"]
    for way in list(WAYS)[1:]:
        total = statistics.median(i + w for _, i, w in spent[way])
        parts.append(f"{way} {total / whole:.3f} ({median[way][1] / whole:.2f} + {median[way][2] / whole:.2f})")
    forward = median["ours"][0] / median["plain"][0]
    print("  ".join([*parts, "limit 1.000", f"  F, ours over plain: {forward:.3f}"]), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=41)
    parser.add_argument("--width", type=int, default=512, help="of the Transformer block")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--channels", type=int, default=64, help="of the ResNet block")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device(asked.device):
        block, residual = Block(asked.width), Residual(asked.channels)
        sequence, images = torch.randn(4, asked.sequence, asked.width), torch.randn(8, asked.channels, 32, 32)
    case("Transformer block", block, sequence.requires_grad_(), asked.repetitions)
    case("ResNet block", residual, images.requires_grad_(), asked.repetitions)


if __name__ == "__main__":
    main()
