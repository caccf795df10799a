"""One training run on the inline engine, as one line of results."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

from benchmarks.study.methods import METHODS, warming
from benchmarks.study.tasks import TASKS
from penstock import Pipeline
from penstock.errors import PenstockError

BIN = 5  # updates to a point of the stored curve
LOST = 2.0  # times the first loss: the run has diverged and is left


@dataclass(frozen=True)
class Run:
    task: str
    method: str
    stages: int  # 0: holds for any number
    rate: float
    seed: int


def train(run: Run, updates: int | None = None) -> dict[str, Any]:
    """The run's numbers: `final` is the mean loss over the last tenth of the updates, None if it diverged."""
    torch.set_num_threads(1)
    begun = time.process_time()
    task = TASKS[run.task]
    updates = task.updates if updates is None else updates
    pipe = pipeline(run)
    losses: list[float] = []
    held = None
    try:
        for step in pipe.train(islice(task.train(run.seed), updates)):
            losses.append(step.loss)
            if not step.loss < LOST * losses[0]:
                break
        else:
            held = pipe.evaluate(task.held_out())
    except PenstockError:  # a loss or a gradient that is no number
        held = None
    tail = losses[-max(1, updates // 10) :]
    return {
        **asdict(run),
        "final": None if held is None else _short(sum(tail) / len(tail)),
        "held_out": None if held is None or not math.isfinite(held) else _short(held),
        "curve": [_short(sum(losses[i : i + BIN]) / len(losses[i : i + BIN])) for i in range(0, len(losses), BIN)],
        "cpu": round(time.process_time() - begun, 1),
    }


def pipeline(run: Run, shape: tuple[int, int] | None = None) -> Pipeline:
    """What trains a run; `shape` is stages and micro-batches, where not the method's own."""
    task, method = TASKS[run.task], METHODS[run.method]
    stages, parts = shape or method.shape(run.stages)
    return Pipeline(
        task.model(run.seed),
        example=(next(task.train(run.seed))[0],),
        stages=stages,
        microbatches=parts,
        schedule=method.schedule,
        cuts=task.cuts(stages),
        loss=task.loss,
        optimizer=partial(method.optimizer, lr=run.rate),
        lr_scheduler=warming,
        verify=False,
        **method.options,
    )


def _short(loss: float) -> float | None:
    return round(loss, 4) if math.isfinite(loss) else None
