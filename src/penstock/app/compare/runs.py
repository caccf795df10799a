"""Train by several methods: one after another in this process, or on workers that run all of them in turn.

A worker runs this module (`python -m`) and writes its results to a folder, as a file for each method and rank.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from penstock.app.compare.memory import StageBytes, stage_bytes
from penstock.app.compare.methods import Method
from penstock.app.compare.result import FINITE, Cause, cause_of
from penstock.app.compare.stopwatch import Stopwatch
from penstock.app.compare.times import utilisation
from penstock.app.compare.track import Track, follow_lines
from penstock.app.config.task import Task
from penstock.app.run.launcher import launch
from penstock.app.run.plain import PlainTraining
from penstock.app.run.request import Request, parse_request, rank
from penstock.app.run.train import last_run
from penstock.app.run.worker_main import command
from penstock.errors import InputError, RankError
from penstock.model.heap import bytes_of
from penstock.training.pipeline import Pipeline

NOTES, FOUND, REFUSED = "notes", "found-{}.json", "refused-{}-{}.json"  # by run, and by rank
WARMING = 2  # steps left out of the times, where there are more


@dataclass(frozen=True)
class RunResult:
    """The result of a run beside its losses and times."""

    stages: StageBytes
    utilisation: float | None  # None where it could not be measured

    def to_json(self) -> dict[str, Any]:
        return {"stages": self.stages, "utilisation": self.utilisation}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunResult:
        return cls({int(at): stage for at, stage in data["stages"].items()}, data["utilisation"])


def train(pipe: Pipeline, task: Task, track: Track) -> None:
    """Train for the whole budget."""
    track.begin()
    for step in pipe.train(task.batches(0, task.config.training.steps)):
        track.record(step.loss)


def train_plain(task: Task, track: Track) -> RunResult:
    """Train for the whole budget in one plain process, which is busy all the time."""
    training = PlainTraining(task)
    track.begin()
    for inputs, target in task.batches(0, task.config.training.steps):
        loss = training.step(inputs, target)
        if not isfinite(loss):
            raise InputError(FINITE[0], loss, "lower the learning rate")
        track.record(loss)
    weights = list(training.model.parameters())
    state = [value for kept in training.optimizer.state.values() for value in kept.values()]
    byte_counts = {
        "weights": bytes_of(weights),
        "buffers": bytes_of(training.model.buffers()),
        "versions": 0,
        "gradients": bytes_of([weight for weight in weights if weight.requires_grad]),
        "optimizer": bytes_of(state),
    }
    return RunResult({0: byte_counts}, 1.0)


def train_rank(task: Task, track: Track) -> RunResult:
    """Train as one of the ranks. Every rank returns the same result."""
    pipe = task.pipeline(verify=False)
    train(pipe, task, track)
    parts = pipe.ranks.world.gather(json.dumps(stage_bytes(pipe)).encode())
    stages = {int(at): stage for part in parts for at, stage in json.loads(part).items()}
    busy = _busy(pipe)
    pipe.close()
    return RunResult(stages, busy)


def _busy(pipe: Pipeline) -> float | None:
    """Return the utilisation of the recorded steps, or of the last run without a flush."""
    if pipe.ranks.alone or pipe.clock is None or pipe.async_trainer is not None:
        line = last_run(pipe)
        return None if line is None else utilisation(line)
    measured = pipe.measured()
    steps = range(len(measured.start))
    warm = [step for step in steps if step + measured.first >= WARMING] or steps
    return float(np.mean([measured.timeline(step).utilisation for step in warm]))


def work(request: Request) -> int:
    """Train several runs as a worker. The rank that fails writes the cause for the process that started it."""
    folder, first = Path(request.flags["out"]), rank() == 0
    with (folder / NOTES).open("a", encoding="utf-8") as notes:
        for number, changes in request.flags["runs"]:
            track = Track(out=notes if first else None, number=number)
            try:
                task = Request(request.config, changes).task()
                result = train_plain(task, track) if request.flags["plain"] else train_rank(task, track)
            except RankError:  # another rank has failed, and writes the cause
                raise
            except Exception as error:
                cause = cause_of(error, len(track.losses)).to_json()
                (folder / REFUSED.format(number, rank())).write_text(json.dumps(cause), encoding="utf-8")
                if not isinstance(error, InputError):
                    raise  # reported to the other ranks
                return 2
            if first:
                (folder / FOUND.format(number)).write_text(json.dumps(result.to_json()), encoding="utf-8")
            gc.collect()  # free memory for the next run
    return 0


OUTPUT = "output"  # the file of the workers' output
ENDED = (129, 130, 143)  # exit codes of a launcher that was ended by SIGHUP, SIGINT or SIGTERM


@dataclass
class MethodRun:
    """One method, its request, and its result or the cause why there is none."""

    method: Method
    request: Request
    track: Track
    result: RunResult | None = None
    cause: Cause | None = None
    watch: Stopwatch | None = None  # of a run whose times are to be simulated


def run_inline(run: MethodRun) -> None:
    """Train with all stages in this process, timed stage by stage; a plain run as it is."""
    try:
        task = run.request.task()
        if run.method.schedule is None:
            run.result = train_plain(task, run.track)
            return
        pipe = task.pipeline(verify=False)
        run.watch = Stopwatch(pipe)
        train(pipe, task, run.track)
        run.result = RunResult(stage_bytes(pipe), None)
    except Exception as error:  # reported in the method's row; other methods go on
        run.cause = cause_of(error, len(run.track.losses))


def run_on_workers(runs: Sequence[MethodRun], workers: int) -> None:
    """Train the plain run on a single worker, then all others. A failure ends the workers, and the remaining runs start
    again."""
    for alone in (True, False):
        left = [run for run in runs if (run.method.schedule is None) is alone]
        while left:
            done = _run_workers(left, 1 if alone else workers, alone)
            left = left[done + 1 :]  # without the one that failed


def _run_workers(runs: Sequence[MethodRun], workers: int, alone: bool) -> int:
    """Train runs on workers. Return how many were trained to the end; the next one then has a cause."""
    with TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name)
        changes = [(number, run.request.changes) for number, run in enumerate(runs)]
        arguments = Request(runs[0].request.config, {}, {"out": name, "plain": alone, "runs": changes}).arguments()

        def take(line: str) -> None:
            number, loss, seconds = line.split()
            runs[int(number)].track.add(float(loss), float(seconds))

        with (folder / OUTPUT).open("a", encoding="utf-8") as output, follow_lines(folder / NOTES, take):
            code = launch(command("penstock.app.compare.runs", arguments), workers, output)
        if code in ENDED:
            raise SystemExit(code)
        return _collect(runs, folder, failed=code != 0)


def _collect(runs: Sequence[MethodRun], folder: Path, failed: bool) -> int:
    for number, run in enumerate(runs):
        file = folder / FOUND.format(number)
        if not file.exists():
            run.cause = _failure_cause(folder, number)
            return number
        run.result = RunResult.from_json(json.loads(file.read_text(encoding="utf-8")))
    if failed:
        runs[-1].cause = _failure_cause(folder, len(runs) - 1)
    return len(runs)


def _failure_cause(folder: Path, number: int) -> Cause:
    """Return the cause that the first failed rank has written, else the last line of output."""
    output = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
    left = sorted(folder.glob(REFUSED.format(number, "*")), key=lambda file: file.stat().st_mtime_ns)
    if left:
        cause = Cause.from_json(json.loads(left[0].read_text(encoding="utf-8")))
        place = re.search(r"^rank \d+ failed in .*$", output, re.MULTILINE)  # its stage and micro-batch
        return replace(cause, traceback=f"{cause.traceback}{place[0]}\n") if cause.failed and place else cause
    lines = [line for line in output.splitlines() if line.strip()] or ["the workers ended without an error message"]
    return Cause(lines[-1].removeprefix("penstock: "), True, output)


if __name__ == "__main__":
    sys.exit(work(parse_request()))
