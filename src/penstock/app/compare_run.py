"""The training by one method for `penstock compare`, in this process: as a rank, or plain.

Workers are started (worker.py) for one method after the other, and leave in a
folder what they found.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from penstock.app.compare_cause import FINITE, cause_of
from penstock.app.compare_memory import StageBytes, stage_bytes
from penstock.app.compare_times import utilisation
from penstock.app.pipeline import Pipeline
from penstock.app.plain import Plain
from penstock.app.start import Request, heard, rank
from penstock.app.task import Task
from penstock.app.track import Track
from penstock.app.train import last_run
from penstock.errors import InputError, RankError
from penstock.model.heap import bytes_of

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


if __name__ == "__main__":
    sys.exit(work(heard()))
