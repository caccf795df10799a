"""What it costs to look at every batch for ignored tokens, and to weigh micro-batches by those that are counted.

    python -m benchmarks.token_weights [--repetitions 15]

One line a case: CPU seconds of a step of a plain loop over micro-batches (the peer, which weighs nothing), and what our
two parts take, each timed by itself, as differences of steps drown in noise: the look at the batch, whose share of the
step stands beside the limit, 0.5%; and the loss of all micro-batches as it is scored, less the same without. `full`:
nothing is ignored. `uneven`: micro-batches have different counts. One thread, float32, 4 micro-batches, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmarks.inline import GPT, WORDS, seconds, sgd, token_loss
from penstock import Pipeline
from penstock.model.batch import piece, spans
from penstock.model.labels import Labels, Memory
from penstock.model.loss import read_loss
from penstock.model.mean_loss import Part, weight_of

PARTS, MOST = 4, 0.005
SIZES = {  # width, layers, length, rows
    "tiny": (32, 4, 16, 8),
    "small": (64, 8, 64, 8),
    "middle": (256, 8, 128, 8),
}


def balanced_loss(result, target):
    """A mean beside another term: it has to be corrected by the weight of the whole batch."""
    return token_loss(result, target) + 0.01 * result.mean().square()


def batch(length, rows, kind):
    x, y = torch.randint(1, WORDS, (rows, length)), torch.randint(1, WORDS, (rows, length))
    if kind == "uneven":
        for row in range(rows):
            y[row, : row * length // rows] = -100
    return x, y


def microseconds(work, count=200):
    """Of one call, CPU time; the least of several medians, as nothing makes it faster than it is."""
    found = []
    for _ in range(5):
        some = []
        for _ in range(count):
            begin = time.perf_counter()
            work()
            some.append(time.perf_counter() - begin)
        found.append(statistics.median(some))
    return min(found) * 1e6


def scored(results, x, y, loss, memory):
    """The losses of all micro-batches, as a step has them."""
    cut = spans(len(x), PARTS)
    labels = Labels((((x,), {}), y), cut, memory, weight_of)
    for number, (result, (first, last)) in enumerate(zip(results, cut, strict=True)):
        with Part(labels, number):
            read_loss(loss(result, piece(y, first, last, len(x))), last - first)


def plainly(results, x, y, loss):
    for result, (first, last) in zip(results, spans(len(x), PARTS), strict=True):
        read_loss(loss(result, piece(y, first, last, len(x))), last - first)


def case(size, kind, name, loss, repetitions):
    """One line of the table; whether it keeps to the limit."""
    width, layers, length, rows = SIZES[size]
    torch.manual_seed(0)
    model, (x, y) = GPT(width, layers, length), batch(length, rows, kind)
    pipe = Pipeline(model, example=x[:2], stages=2, microbatches=PARTS, loss=loss, optimizer=sgd)
    for _ in range(2):  # what is asked once is not asked again
        pipe.step(x, y)
    optimizer = sgd(model.parameters())

    def step():
        for part, target in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
            (loss(model(part), target) / PARTS).nan_to_num().backward()
        optimizer.step()
        optimizer.zero_grad()

    whole = statistics.median(seconds(step) for _ in range(repetitions)) * 1e6
    look = microseconds(lambda: pipe.checks.every_batch(loss, x, y))
    results, memory = [model(part).detach().requires_grad_() for part in x.chunk(PARTS)], Memory()
    more = microseconds(lambda: scored(results, x, y, loss, memory)) - microseconds(
        lambda: plainly(results, x, y, loss)
    )
    share = look / whole
    print(
        f"{size:7} d {width:<4} {layers} layers  {kind:7} {name:13} plain step {whole / 1e3:8.2f} ms   "
        f"look {look:5.1f} us {share:7.3%}   limit {MOST:.1%}   scoring {more:6.1f} us {more / whole:7.3%}"
    )
    return share <= MOST


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repetitions", type=int, default=15)
    repetitions = options.parse_args().repetitions
    torch.set_num_threads(1)
    losses = {"a mean": token_loss, "beside others": balanced_loss}
    met = [
        case(size, kind, name, loss, repetitions)
        for size in SIZES
        for kind in ("full", "uneven")
        for name, loss in losses.items()
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    raise SystemExit(main())
