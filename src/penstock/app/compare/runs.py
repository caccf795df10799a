"""Train by several methods: one after the other in this process, or on workers that go from one to the next.

A worker runs this module (`python -m`) and leaves its result in a folder, as a file for each method and rank.
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
from penstock.app.compare.track import Track, following
from penstock.app.config.task import Task
from penstock.app.run.launcher import launch
from penstock.app.run.plain import Plain
from penstock.app.run.request import Request, heard, rank
from penstock.app.run.train import last_run
from penstock.app.run.worker_main import command
from penstock.errors import InputError, RankError
from penstock.model.heap import bytes_of
from penstock.training.pipeline import Pipeline

NOTES, FOUND, REFUSED = "notes", "found-{}.json", "refused-{}-{}.json"  # by run, and by rank
WARMING = 2  # steps whose times are left out, where there are more


@dataclass(frozen=True)
class Found:
    """What a run can say after it has ended, beside its losses and times."""

    stages: StageBytes
    utilisation: float | None  # None where nobody could measure it

    def to_json(self) -> dict[str, Any]:
        return {"stages": self.stages, "utilisation": self.utilisation}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Found:
        return cls({int(at): stage for at, stage in data["stages"].items()}, data["utilisation"])


def train(pipe: Pipeline, task: Task, track: Track) -> None:
    """The whole budget."""
    track.begin()
    for step in pipe.train(task.batches(0, task.config.training.steps)):
        track.note(step.loss)


def plain(task: Task, track: Track) -> Found:
    """The same in one plain process, which is busy all the time."""
    one = Plain(task)
    track.begin()
    for inputs, target in task.batches(0, task.config.training.steps):
        loss = one.step(inputs, target)
        if not isfinite(loss):
            raise InputError(FINITE[0], loss, "lower the learning rate")
        track.note(loss)
    weights = list(one.model.parameters())
    state = [value for kept in one.optimizer.state.values() for value in kept.values()]
    found = {
        "weights": bytes_of(weights),
        "buffers": bytes_of(one.model.buffers()),
        "versions": 0,
        "gradients": bytes_of([weight for weight in weights if weight.requires_grad]),
        "optimizer": bytes_of(state),
    }
    return Found({0: found}, 1.0)


def on_rank(task: Task, track: Track) -> Found:
    """As one of the ranks; every one gets the same."""
    pipe = task.pipeline(verify=False)
    train(pipe, task, track)
    told = pipe.crew.world.gather(json.dumps(stage_bytes(pipe)).encode())
    stages = {int(at): stage for part in told for at, stage in json.loads(part).items()}
    busy = _busy(pipe)
    pipe.close()
    return Found(stages, busy)


def _busy(pipe: Pipeline) -> float | None:
    """Of the steps that were kept, or of the last run without a flush."""
    if pipe.crew.alone or pipe.clock is None or pipe.async_trainer is not None:
        line = last_run(pipe)
        return None if line is None else utilisation(line)
    seen = pipe.measured()
    steps = range(len(seen.start))
    warm = [step for step in steps if step + seen.first >= WARMING] or steps
    return float(np.mean([seen.timeline(step).utilisation for step in warm]))


def work(request: Request) -> int:
    """A worker's share of several runs. What went wrong is left for whoever started it, by the rank that knows."""
    folder, first = Path(request.flags["out"]), rank() == 0
    with (folder / NOTES).open("a", encoding="utf-8") as notes:
        for number, changes in request.flags["runs"]:
            track = Track(out=notes if first else None, number=number)
            try:
                task = Request(request.config, changes).task()
                found = plain(task, track) if request.flags["plain"] else on_rank(task, track)
            except RankError:  # another rank has failed, and leaves the cause
                raise
            except Exception as error:
                cause = cause_of(error, len(track.losses)).to_json()
                (folder / REFUSED.format(number, rank())).write_text(json.dumps(cause), encoding="utf-8")
                if not isinstance(error, InputError):
                    raise  # the other ranks have to be told
                return 2
            if first:
                (folder / FOUND.format(number)).write_text(json.dumps(found.to_json()), encoding="utf-8")
            gc.collect()  # what the next one needs
    return 0


WORDS = "words"  # the file of what workers say
ENDED = (129, 130, 143)  # codes of a launcher that was told to end: by SIGHUP, SIGINT, SIGTERM


@dataclass
class Run:
    """One method, as it was asked for and as it went: what was found, or the cause why nothing was."""

    method: Method
    request: Request
    track: Track
    found: Found | None = None
    cause: Cause | None = None
    watch: Stopwatch | None = None  # of a run whose times are to be simulated


def run_inline(run: Run) -> None:
    """All stages in this process, timed stage by stage; the plain process as it is."""
    try:
        task = run.request.task()
        if run.method.schedule is None:
            run.found = plain(task, run.track)
            return
        pipe = task.pipeline(verify=False)
        run.watch = Stopwatch(pipe)
        train(pipe, task, run.track)
        run.found = Found(stage_bytes(pipe), None)
    except Exception as error:  # it is told in the method's row: others go on
        run.cause = cause_of(error, len(run.track.losses))


def run_on_workers(runs: Sequence[Run], workers: int) -> None:
    """The plain process as a worker by itself, then all others; whoever fails ends the workers, and the rest starts
    anew."""
    for alone in (True, False):
        left = [run for run in runs if (run.method.schedule is None) is alone]
        while left:
            done = _launched(left, 1 if alone else workers, alone)
            left = left[done + 1 :]  # without the one that failed


def _launched(runs: Sequence[Run], workers: int, alone: bool) -> int:
    """How many of them were trained to the end; the next one then has a cause."""
    with TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name)
        changes = [(number, run.request.changes) for number, run in enumerate(runs)]
        words = Request(runs[0].request.config, {}, {"out": name, "plain": alone, "runs": changes}).words()

        def take(line: str) -> None:
            number, loss, seconds = line.split()
            runs[int(number)].track.take(float(loss), float(seconds))

        with (folder / WORDS).open("a", encoding="utf-8") as said, following(folder / NOTES, take):
            code = launch(command("penstock.app.compare.runs", words), workers, said)
        if code in ENDED:
            raise SystemExit(code)
        return _taken(runs, folder, failed=code != 0)


def _taken(runs: Sequence[Run], folder: Path, failed: bool) -> int:
    for number, run in enumerate(runs):
        file = folder / FOUND.format(number)
        if not file.exists():
            run.cause = _why(folder, number)
            return number
        run.found = Found.from_json(json.loads(file.read_text(encoding="utf-8")))
    if failed:
        runs[-1].cause = _why(folder, len(runs) - 1)
    return len(runs)


def _why(folder: Path, number: int) -> Cause:
    """What the first rank that failed has left behind; else the launcher's last words, after those of the ranks."""
    said = (folder / WORDS).read_text(encoding="utf-8", errors="replace")
    left = sorted(folder.glob(REFUSED.format(number, "*")), key=lambda file: file.stat().st_mtime_ns)
    if left:
        cause = Cause.from_json(json.loads(left[0].read_text(encoding="utf-8")))
        place = re.search(r"^rank \d+ failed in .*$", said, re.MULTILINE)  # its stage and micro-batch
        return replace(cause, traceback=f"{cause.traceback}{place[0]}\n") if cause.failed and place else cause
    lines = [line for line in said.splitlines() if line.strip()] or ["the workers ended without a word"]
    return Cause(lines[-1].removeprefix("penstock: "), True, said)


if __name__ == "__main__":
    sys.exit(work(heard()))
