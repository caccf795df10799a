"""The tables of docs/convergence.md, made from the results: a test compares them."""

from __future__ import annotations

from benchmarks.study.costs import method_cost, one_step
from benchmarks.study.methods import METHODS
from benchmarks.study.plan import Line
from benchmarks.study.summary import Outcome, best_synchronous, grid, outcome, target
from benchmarks.study.tasks import ROWS, TASKS

STAGES = (4, 8, 16)
NONE = "–"


def tables(lines: list[Line]) -> dict[str, str]:
    """By name; the page holds each one word for word."""
    found = {"costs": costs()}
    for task in TASKS:
        found[f"{task} losses"] = losses(lines, task)
        found[f"{task} rates"] = rates(lines, task)
    return found


def losses(lines: list[Line], task: str) -> str:
    """Final losses at the best rate, and what it took at 8 stages."""
    head = ["method", "rate at 8", *(f"{p} stages" for p in STAGES), "spread at 8", "held out at 8"]
    rows = [[*head, "samples to target at 8", "predicted s"]]
    goal = target(lines, task)
    for name in _methods(task):
        at = {p: outcome(lines, task, name, p) for p in STAGES}
        ran = {p for p in STAGES if grid(lines, task, name, p)}
        finals = [_loss(one.final if one else None, goal) if p in ran else NONE for p, one in at.items()]
        rows.append([name, *_row(at[8], finals, task, goal)])
    return _markdown(rows)


def _row(eight: Outcome | None, finals: list[str], task: str, goal: float) -> list[str]:
    if eight is None:
        return [NONE, *finals, NONE, NONE, NONE, NONE]
    updates = eight.reached(task, goal)
    known = [loss for loss in eight.finals if loss is not None]
    return [
        f"{eight.rate:g}",
        *finals,
        f"{max(known) - min(known):.2f}",
        NONE if eight.held_out is None else f"{eight.held_out:.2f}",
        NONE if updates is None else f"{updates * ROWS:,.0f}",
        NONE if updates is None else f"{eight.seconds(updates):,.0f}",
    ]


def _loss(loss: float | None, goal: float) -> str:
    """Bold: within 2% of the best synchronous one."""
    if loss is None:
        return "diverged"
    return f"**{loss:.3f}**" if loss <= goal else f"{loss:.3f}"


def rates(lines: list[Line], task: str) -> str:
    """Final losses on seed 0 over the grid of rates and the numbers of stages."""
    columns = [f"{rate:g}" for rate in TASKS[task].rates]
    rows = [["method", *(f"{p}: {columns[0]}" if i == 0 else columns[i] for p in STAGES for i in range(len(columns)))]]
    goal = target(lines, task)
    for name in _methods(task):
        found = [(grid(lines, task, name, p), rate) for p in STAGES for rate in TASKS[task].rates]
        rows.append([name, *(_loss(losses[rate], goal) if rate in losses else NONE for losses, rate in found)])
    return _markdown(rows)


def costs() -> str:
    """Predicted seconds a mini-batch, memory, versions and activations."""
    rows = [["schedule", *(f"s, p = {p}" for p in STAGES), "versions at 8", "activations at 8", "memory at 8"]]
    for name, times in (("gpipe", 4), ("1f1b", 1), ("1f1b", 4), ("zb-h2", 4), ("zb-v", 4)):
        found = [one_step(name, p, times * p) for p in STAGES]
        label = f"{name}, m = {times if times > 1 else ''}p"
        rows.append([label, *(f"{cost.seconds:.2f} ({cost.flowing:.2f})" for cost in found), *_held(found[1])])
    for name in (
        "2bw",
        "2bw predict",
        "pipedream m=4p muon",
        "pipedream",
        "pipedream predict",
        "pipemare bare",
        "pipemare T2",
    ):
        found = [method_cost(name, p) for p in STAGES]
        label = f"{name.removesuffix(' m=4p muon')}, m = {('1', 'p', '', '', '4p')[METHODS[name].times]}"
        rows.append([label, *(f"{cost.seconds:.2f}" for cost in found), *_held(found[1])])
    return _markdown(rows)


def _held(cost) -> list[str]:
    return [f"{cost.versions:g}", f"{cost.activations:.3g}", f"{cost.memory:.2f}"]


def best_line(lines: list[Line], task: str) -> str:
    """The synchronous run that all are measured against, in words."""
    best = best_synchronous(lines, task)
    return f"{task}: {best.method} at {best.rate:g}, loss {best.final:.3f}, so the target is {target(lines, task):.3f}"


def _methods(task: str) -> list[str]:
    found = [name for name, method in METHODS.items() if task in method.tasks]
    return sorted(found, key=lambda name: ("1f1b", "2bw", "pipedream", "pipemare").index(METHODS[name].schedule))


def _markdown(rows: list[list[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body]) + "\n"
