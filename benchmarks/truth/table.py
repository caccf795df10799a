"""The table: predicted and measured seconds of a step, how far off each is, and which pairs are in the wrong order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

APART = 0.03  # predictions that differ by more must be in the right order
HEAD = f"{'model':<10} {'schedule':<12} {'predicted':>12} {'measured':>12} {'error':>8}"


@dataclass(frozen=True)
class Line:
    """Seconds of a step."""

    model: str
    schedule: str
    predicted: float
    measured: float
    quiet: str = ""  # what is to be said of the samples

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        figures = f"{self.predicted * 1e3:>9.1f} ms {self.measured * 1e3:>9.1f} ms {self.error:>+8.1%}"
        return f"{self.model:<10} {self.schedule:<12} {figures}  {self.quiet}".rstrip()


def mean_error(lines: Sequence[Line]) -> float:
    """Without signs."""
    return sum(abs(line.error) for line in lines) / len(lines)


@dataclass(frozen=True)
class Order:
    """Pairs of one model's schedules whose predictions are apart, and those of them that came out the other way."""

    pairs: int
    wrong: tuple[tuple[Line, Line], ...]


def order(lines: Sequence[Line]) -> Order:
    pairs, wrong = 0, []
    for _, group in groupby(sorted(lines, key=lambda line: line.model), key=lambda line: line.model):
        for one, other in combinations(group, 2):
            fast, slow = sorted((one, other), key=lambda line: line.predicted)
            if slow.predicted > (1 + APART) * fast.predicted:
                pairs += 1
                if fast.measured >= slow.measured:
                    wrong.append((fast, slow))
    return Order(pairs, tuple(wrong))


def summary(lines: Sequence[Line]) -> list[str]:
    found = order(lines)
    models = dict.fromkeys(line.model for line in lines)
    each = ", ".join(f"{model} {mean_error([line for line in lines if line.model == model]):.1%}" for model in models)
    said = [
        f"mean absolute error {mean_error(lines):.1%} ({each}), the largest {max(abs(x.error) for x in lines):.1%}",
        f"pairs predicted more than {APART:.0%} apart: {found.pairs}, out of order: {len(found.wrong)}",
    ]
    return said + [
        f"  {fast.model}: {fast.schedule} was predicted faster than {slow.schedule}, and took "
        f"{fast.measured / slow.measured - 1:+.1%}"
        for fast, slow in found.wrong
    ]


def markdown(lines: Sequence[Line]) -> str:
    """The same for a page."""
    rows = ["| model | schedule | predicted | measured | error |", "|---|---|---|---|---|"]
    rows += [
        f"| {line.model} | {line.schedule} | {line.predicted * 1e3:.1f} ms | {line.measured * 1e3:.1f} ms "
        f"| {line.error:+.1%} |"
        for line in lines
    ]
    return "\n".join(rows)
