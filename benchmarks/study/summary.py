"""What the runs say: final losses, what it took to reach the best synchronous one, and where methods break."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from benchmarks.study.costs import Cost, method_cost
from benchmarks.study.methods import METHODS, T3
from benchmarks.study.plan import ANY, Line, best_rate, by_cell
from benchmarks.study.run import BIN
from benchmarks.study.tasks import TASKS

NEAR = 1.02  # times the best synchronous loss counts as reached


@dataclass(frozen=True)
class Outcome:
    """A method on a task with so many stages, at its best rate, over the seeds."""

    method: str
    stages: int
    rate: float
    finals: tuple[float | None, ...]  # by seed
    held_out: float | None
    curve: list[float]  # losses of BIN updates each, the mean over the seeds

    @property
    def final(self) -> float | None:
        """None if a seed diverged."""
        return None if None in self.finals else fmean(loss for loss in self.finals if loss is not None)

    @property
    def cost(self) -> Cost:
        return method_cost(self.method, self.stages)

    def seconds(self, updates: float) -> float:
        """Predicted, for so many mini-batches; those of T3 at the price of the synchronous ones."""
        synchronous = min(updates, T3) if "t3" in METHODS[self.method].options else 0
        return method_cost("synchronous", self.stages).at(synchronous) + self.cost.at(updates - synchronous)

    def smooth(self, updates: int) -> list[tuple[int, float]]:
        """After so many updates, the mean loss of the tenth of the run before."""
        bins = max(1, updates // 10 // BIN)
        return [(BIN * at, fmean(self.curve[at - bins : at])) for at in range(bins, len(self.curve) + 1)]

    def reached(self, task: str, target: float) -> float | None:
        """Updates until the smoothed loss is at the target, on a straight line between its points."""
        points = self.smooth(TASKS[task].updates)
        for (before, high), (after, low) in pairwise(points):
            if low <= target:
                return before + (after - before) * max(0.0, (high - target) / (high - low))
        return None


def outcome(lines: list[Line], task: str, method: str, stages: int) -> Outcome | None:
    """None where no rate of the grid got through, or nothing was run."""
    mine = by_cell(lines).get((task, method, stages if METHODS[method].staged else ANY), [])
    rate = best_rate(mine)
    best = sorted((line for line in mine if line["rate"] == rate), key=lambda line: line["seed"])
    if rate is None or not best:
        return None
    held = [line["held_out"] for line in best]
    length = min(len(line["curve"]) for line in best)
    curve = [fmean(line["curve"][at] for line in best) for at in range(length)]
    finals = tuple(line["final"] for line in best)
    return Outcome(method, stages, rate, finals, None if None in held else fmean(held), curve)


def best_synchronous(lines: list[Line], task: str) -> Outcome:
    every = (outcome(lines, task, name, 8) for name, method in METHODS.items() if method.schedule == "1f1b")
    ended = [(one.final, one) for one in every if one is not None and one.final is not None]
    return min(ended, key=lambda pair: pair[0])[1]


def target(lines: list[Line], task: str) -> float:
    found = best_synchronous(lines, task).final
    assert found is not None
    return NEAR * found


def grid(lines: list[Line], task: str, method: str, stages: int) -> dict[float, float | None]:
    """Final losses on seed 0, by rate; None: diverged. Empty where nothing was run."""
    mine = by_cell(lines).get((task, method, stages if METHODS[method].staged else ANY), [])
    return {line["rate"]: line["final"] for line in mine if line["seed"] == 0}
