"""`penstock profile`: from a config to a Profile, measured here by as many processes at a time as will train.

Where that is more than one, they are workers that run this (run/worker_main.py); the first leaves what all of them
found in a file.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import torch

from penstock.app.config.task import Task
from penstock.app.profile.api import profiled
from penstock.app.run.progress import progress_of_samples
from penstock.app.run.request import Request, as_worker, rank
from penstock.comm.world.world import join
from penstock.core.profile import Profile
from penstock.core.validation import whole
from penstock.model.batch import as_call, piece, rows_of, spans
from penstock.profiler.joined import joined
from penstock.profiler.measure import Measured
from penstock.profiler.sampling import Company
from penstock.training.option_checks import home_of


def run(request: Request, busy: int | None, out: TextIO | None) -> Measured | int:
    """Measure; or, where workers failed, their exit code. `busy` processes at a time, or as many as the config has
    stages where these will share this host's cores."""
    task = request.task()
    processes = _usual(task) if busy is None else whole("busy", busy)
    if processes == 1:
        return _measured(task, request, Company(), out)
    from penstock.app.run.launcher import launch
    from penstock.app.run.worker_main import command

    with TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        asked = replace(request, flags=request.flags | {"out": str(found)})
        code = launch(command("penstock.app.profile.command", asked.words()), processes)
        return code or _from_json(json.loads(found.read_text(encoding="utf-8")))


def _usual(task: Task) -> int:
    on_host = not torch.cuda.is_available() or home_of(task.model()).type == "cpu"
    return task.config.pipeline.stages if on_host else 1


def _measured(task: Task, request: Request, company: Company, out: TextIO | None) -> Measured:
    """In this process."""
    section, (inputs, target) = task.config.pipeline, next(task.batches(0, 1))
    rows = rows_of(as_call(inputs), target)
    first = spans(rows, section.microbatches)[0]
    with progress_of_samples("measuring layers", out) as show:
        return profiled(
            task.model(), piece(inputs, *first), piece(target, *first, rows), loss=task.loss, optimizer=task.optimizer,
            precision=task.precision, microbatches=section.microbatches, repetitions=request.flags["repetitions"],
            threads=request.flags["threads"], seed=section.seed, company=company, show=show,
        )  # fmt: skip


def work(request: Request) -> int:
    """One of several processes that measure at the same time."""
    world = join()
    assert world is not None
    company = Company(world.gather, os.getppid())
    mine = _measured(request.task(), request, company, sys.stderr if rank() == 0 else None)
    every = [_from_json(json.loads(part)) for part in world.gather(json.dumps(_to_json(mine)).encode())]
    if rank() == 0:
        found = replace(mine, profile=joined([one.profile for one in every]))
        Path(request.flags["out"]).write_text(json.dumps(_to_json(found)), encoding="utf-8")
    return 0


def _to_json(found: Measured) -> dict[str, Any]:
    return asdict(found) | {"profile": found.profile.to_json()}


def _from_json(data: dict[str, Any]) -> Measured:
    return Measured(**data | {"profile": Profile.from_json(data["profile"])})


if __name__ == "__main__":
    as_worker(work)
