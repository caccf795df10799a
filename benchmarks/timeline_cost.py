"""What measuring costs: steps of two workers with their timeline kept, beside the same steps without.

    python -m benchmarks.timeline_cost [--repetitions 20]

Three ways. The steps themselves, interleaved, medians of the samples that nobody disturbed: what a user feels, as far
as it stands out of the noise. The CPU seconds of the same steps, which others disturb less. And the readings alone: so
many a step, each timed by itself, as a share of the step.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from benchmarks.workers.contest import Contest
from benchmarks.workers.sampling import collect
from benchmarks.workers.team import Team
from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow
from penstock.engine.measure.clock import Clock

RANKS, MICROBATCHES = 2, 8
MOST = 0.01  # of a step
SIZES = {  # width, layers, length, rows of a micro-batch; steps of a sample, that it lasts long enough to be judged
    "tiny": (32, 4, 16, 1, 20),
    "middle": (256, 8, 64, 4, 2),
}
WORDS = 100


def token_loss(result, target):
    return F.cross_entropy(result.flatten(0, 1), target.flatten())


class Model:
    """A GPT on two ranks, with or without its timeline."""

    def __init__(self, size, timeline):
        from penstock import Pipeline
        from penstock.models.gpt import GPT

        width, layers, length, rows, self.steps = SIZES[size]
        torch.manual_seed(0)
        model = GPT(vocab=WORDS, width=width, heads=4, layers=layers, length=length)
        self.ids = torch.randint(0, WORDS, (rows * MICROBATCHES, length))
        self.pipe = Pipeline(
            model,
            example=self.ids[:rows],
            stages=RANKS,
            microbatches=MICROBATCHES,
            loss=token_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            timeline=timeline,
        )

    def zero(self):
        pass

    def step(self):
        begin = time.process_time()
        for _ in range(self.steps):
            self.pipe.step(self.ids, self.ids)
        return {"cpu": time.process_time() - begin}

    @property
    def readings(self):
        """Of one step."""
        return 0 if self.pipe.clock is None else self.pipe.clock.runs[-1].readings.shape[-1]


class Both(Contest):
    """On one rank: every size, measured and not."""

    products = 6

    def __init__(self, rank):
        super().__init__({f"{size} {word}": Model(size, word == "on") for size in SIZES for word in ("off", "on")})

    def readings(self, name):
        return self.contenders[name].readings


def seconds_of_a_reading(count=20_000):
    """Into a list that grows as a step's does."""
    found = []
    for _ in range(9):
        clock, row = Clock((0,)), ActionRow(Op.F, 0, 0, 0, -1)
        clock.begin(0)
        begin = time.perf_counter()
        for _ in range(count):
            clock.after(row)
        found.append((time.perf_counter() - begin) / count)
    return statistics.median(found)


def report(found, readings, each):
    """The lines of the table, and whether all that was wanted is met: without quiet samples nobody can tell."""
    met = True
    print(f"one reading of the clock: {each * 1e9:.0f} ns; at most {MOST:.0%} of a step is wanted\n")
    head = f"{'model':8}{'off':>12}{'on':>12}{'on/off':>9}{'of CPU':>9}{'readings':>10}{'their share':>13}"
    print(head + "   quiet samples (off, on)")
    for size, (*_, steps) in SIZES.items():
        off, on = found[f"{size} off"], found[f"{size} on"]
        before, after = off.seconds / steps, on.seconds / steps
        cpu = [sum(samples.told(rank, "cpu") for rank in range(RANKS)) for samples in (off, on)]
        share = readings[f"{size} on"] * each / before
        counts = f"{len(off.quiet)} of {len(off.all)}, {len(on.quiet)} of {len(on.all)}"
        print(
            f"{size:8}{before * 1e3:9.2f} ms{after * 1e3:9.2f} ms{after / before:9.4f}{cpu[1] / cpu[0]:9.4f}"
            f"{readings[f'{size} on']:10d}{share:13.4%}   {counts}"
        )
        met &= share <= MOST and bool(off.quiet and on.quiet) and after <= before * (1 + MOST)
    return met


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--patience", type=int, default=3, help="rounds at most, in repetitions")
    asked = parser.parse_args()
    with Team(RANKS, Both) as team:
        names = team.ask("names")[0]
        found = collect(team, names, asked.repetitions, asked.patience)
        readings = {name: max(team.ask("readings", name)) for name in names}
    return 0 if report(found, readings, seconds_of_a_reading()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
