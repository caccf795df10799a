"""The pictures of docs/convergence.md."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, log2
from pathlib import Path

from benchmarks.study.chart import Axis, Series, chart
from benchmarks.study.methods import METHODS
from benchmarks.study.plan import Line
from benchmarks.study.summary import Outcome, outcome, target
from benchmarks.study.tasks import ROWS, TASKS

# One colour a schedule; a dash tells its forms apart.
LOOKS = {
    "synchronous": ("#10151c", ""),
    "synchronous nesterov": ("#10151c", "7 4"),
    "synchronous muon": ("#10151c", "2 3"),
    "2bw": ("#1a9a70", ""),
    "2bw nesterov": ("#1a9a70", "7 4"),
    "2bw predict": ("#1a9a70", "10 3 2 3"),
    "2bw muon": ("#1a9a70", "2 3"),
    "pipedream m=4p muon": ("#9b3fb5", ""),
    "pipedream": ("#2b6fb3", ""),
    "pipedream nesterov": ("#2b6fb3", "7 4"),
    "pipedream predict": ("#2b6fb3", "10 3 2 3"),
    "pipedream vertical": ("#8fbdea", ""),
    "pipemare bare": ("#f0b98a", ""),
    "pipemare T2": ("#e8881c", "2 3"),
    "pipemare T1+T2": ("#c75f00", ""),
    "pipemare T1+T2+T3": ("#c75f00", "7 4"),
}


def draw(lines: list[Line], place: Path) -> list[Path]:
    made = []
    for task in TASKS:
        pictures = {
            "samples": _curves(lines, task, "samples", lambda one, at: at * ROWS),
            "time": _curves(lines, task, "predicted seconds", Outcome.seconds),
            "stages": _stages(lines, task),
        }
        for what, picture in pictures.items():
            made.append(place / f"convergence-{task}-{what}.svg")
            made[-1].write_text(picture)
    return made


def _curves(lines: list[Line], task: str, label: str, across: Callable[[Outcome, int], float]) -> str:
    series, updates = [], TASKS[task].updates
    for name, look in LOOKS.items():
        one = outcome(lines, task, name, 8) if task in METHODS[name].tasks else None
        if one is not None and one.final is not None:
            series.append(Series(name, [(across(one, at), loss) for at, loss in one.smooth(updates)], *look))
    x = _axis(label, 0.0, max(a for one in series for a, _ in one.points))
    title = f"{TASKS[task].title}, 8 stages: loss against {label}"
    return chart(title, x, _losses(series), series, _level(lines, task))


def _stages(lines: list[Line], task: str) -> str:
    series = []
    for name, look in LOOKS.items():
        method = METHODS[name]
        everywhere = task in method.tasks and (not method.staged or len(method.stages) == 3)
        found = [outcome(lines, task, name, p) for p in (4, 8, 16)] if everywhere else []
        points = [(log2(one.stages), one.final) for one in found if one is not None and one.final is not None]
        if points:
            series.append(Series(name, points, *look, marks=True))
    x = Axis("stages", 1.8, 4.2, (2, 3, 4), ("4", "8", "16"))
    title = f"{TASKS[task].title}: final loss against stages"
    return chart(title, x, _losses(series), series, _level(lines, task))


def _level(lines: list[Line], task: str) -> tuple[float, str]:
    return target(lines, task), "best synchronous + 2%"


def _losses(series: list[Series]) -> Axis:
    every = [b for one in series for _, b in one.points]
    least, most = min(every), min(max(every), 2 * min(every))
    step = 0.2 if most - least < 1.4 else 0.5
    low, high = floor(least / step - 0.2), ceil(most / step)
    ticks = [step * at for at in range(low, high + 1)]
    return Axis("training loss", ticks[0], ticks[-1], ticks, [f"{tick:.1f}" for tick in ticks])


def _axis(label: str, low: float, high: float) -> Axis:
    step = next(size for power in range(7) for digit in (1, 2, 5) if high / (size := digit * 10**power) <= 8)
    return Axis(label, low, high, [step * at for at in range(int(high / step) + 1)])
