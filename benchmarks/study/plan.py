"""Which runs the study consists of, and which of them come next.

Every method is trained with every learning rate of the grid on seed 0, then with its best one on two more seeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.study.methods import METHODS
from benchmarks.study.run import Run
from benchmarks.study.tasks import TASKS

SEEDS = (0, 1, 2)
ANY = 0  # in place of a number of stages, where losses do not depend on it
RESULTS = Path(__file__).parent / "results.jsonl"
Line = dict[str, Any]
Cell = tuple[str, str, int]  # task, method, stages


def read(path: Path = RESULTS) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cells() -> list[Cell]:
    """The most wanted first: what holds for any number of stages, then 8."""
    every = [
        (task, method.name, stages)
        for method in METHODS.values()
        for stages in (method.stages if method.staged else (ANY,))
        for task in method.tasks
    ]
    return sorted(every, key=lambda cell: (ANY, 8, 16, 4).index(cell[2]))


def by_cell(lines: Iterable[Line]) -> dict[Cell, list[Line]]:
    found: dict[Cell, list[Line]] = {}
    for line in lines:
        found.setdefault((line["task"], line["method"], line["stages"]), []).append(line)
    return found


def best_rate(lines: Iterable[Line]) -> float | None:
    """Of the grid on seed 0, by the final loss; None where every rate diverged."""
    ended = [line for line in lines if line["seed"] == 0 and line["final"] is not None]
    return min(ended, key=lambda line: line["final"])["rate"] if ended else None


def missing(lines: list[Line]) -> Iterator[Run]:
    """Runs that can be done now, the most wanted first."""
    done = {(line["task"], line["method"], line["stages"], line["rate"], line["seed"]) for line in lines}
    known = by_cell(lines)
    for cell in cells():
        grid = [Run(*cell, rate, 0) for rate in TASKS[cell[0]].rates]
        left = [run for run in grid if _key(run) not in done]
        yield from left
        rate = None if left else best_rate(known[cell])
        if rate is not None:
            yield from (run for seed in SEEDS[1:] if _key(run := Run(*cell, rate, seed)) not in done)


def _key(run: Run) -> tuple[str, str, int, float, int]:
    return run.task, run.method, run.stages, run.rate, run.seed
