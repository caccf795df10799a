"""What it costs that all ranks look at their gradients, and agree that they are finite, before every update.

    python -m benchmarks.finite [--steps 8]

One line for each model and number of ranks: seconds of a step, of the look at a rank's gradients (of the rank for which
it takes longest) and of the agreement where all come at once, and both as a share of the step beside the limit, 0.3%.
One thread a rank, float32, 1f1b, 8 micro-batches. In a step the ranks do not come at once: all but the last one look
and wait while they would have waited for work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

from penstock import Pipeline
from penstock.app.run.launcher import launch
from penstock.models.gpt import GPT
from penstock.training.finite_gradients import all_finite

LIMIT = 0.003
CASES = {  # name: width, layers, length, rows of a batch
    "GPT d128": (128, 6, 64, 32),
    "GPT d256": (256, 8, 128, 16),
}
RANKS = (1, 2, 4)
AGAIN = 50


def token_loss(out, target):
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def median_of(work, count=AGAIN):
    times = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measured(case, steps):
    """On one rank: seconds of a step, a look and an agreement."""
    width, layers, length, rows = CASES[case]
    torch.manual_seed(0)
    model = GPT(vocab=256, width=width, heads=4, layers=layers, length=length)
    x = torch.randint(0, 256, (rows, length))
    pipe = Pipeline(
        model, example=x[:2], stages=int(os.environ.get("WORLD_SIZE", "1")), microbatches=8, loss=token_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4), verify=False,
    )  # fmt: skip
    pipe.step(x, x)
    step = median_of(lambda: pipe.step(x, x), steps)
    gradients = {parameter: torch.randn_like(parameter) for parameter in pipe.optimizers.parameters}
    look = median_of(lambda: all_finite(gradients))
    agree = median_of(lambda: pipe.ranks.world.all_well(True))
    return [json.loads(part) for part in pipe.ranks.world.gather(json.dumps([step, look, agree]).encode())]


def main(case, steps):
    torch.set_num_threads(1)
    ranks = measured(case, steps)
    if os.environ.get("RANK", "0") == "0":
        step, look, agree = (max(values) for values in zip(*ranks, strict=True))
        share = (look + agree) / step
        print(f"{case:10} {len(ranks)} ranks  step {step * 1e3:8.1f} ms  look {look * 1e6:6.0f} us  "
              f"agreement {agree * 1e6:5.0f} us  {share:.3%} of the step (limit {LIMIT:.1%})", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--case")
    asked = parser.parse_args()
    if asked.case:
        main(asked.case, asked.steps)
        sys.exit()
    for case in CASES:
        for ranks in RANKS:
            command = ["-m", "benchmarks.finite", "--case", case, "--steps", str(asked.steps)]
            code = launch([sys.executable, *command], ranks)
            if code:
                sys.exit(code)
