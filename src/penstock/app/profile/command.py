"""`penstock profile`: measure the profile of a config, in as many processes at a time as will train.

With more than one, they are workers that run this module (run/worker_main.py); the first writes the results of all to a
file.
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
from penstock.app.profile.api import measure_profile
from penstock.app.run.progress import progress_of_samples
from penstock.app.run.request import Request, rank, run_worker
from penstock.comm.world.world import join
from penstock.core.profile import Profile
from penstock.core.validation import whole
from penstock.model.batch import as_call, piece, rows_of, spans
from penstock.profiler.combine import combine_profiles
from penstock.profiler.measure import MeasuredProfile
from penstock.profiler.sampling import Peers
from penstock.training.option_checks import home_of


def run(request: Request, busy: int | None, out: TextIO | None) -> MeasuredProfile | int:
    """Measure, or return the exit code of failed workers. `busy` processes measure at a time; by default as many as
    train, where they share this host's cores."""
    task = request.task()
    processes = _usual(task) if busy is None else whole("busy", busy)
    if processes == 1:
        return _measured(task, request, Peers(), out)
    from penstock.app.run.launcher import launch
    from penstock.app.run.worker_main import command

    with TemporaryDirectory() as folder:
        results_file = Path(folder) / "results.json"
        worker_request = replace(request, flags=request.flags | {"out": str(results_file)})
        code = launch(command("penstock.app.profile.command", worker_request.arguments()), processes)
        return code or _from_json(json.loads(results_file.read_text(encoding="utf-8")))


def _usual(task: Task) -> int:
    on_host = not torch.cuda.is_available() or home_of(task.model()).type == "cpu"
    return task.config.pipeline.workers if on_host else 1


def _measured(task: Task, request: Request, peers: Peers, out: TextIO | None) -> MeasuredProfile:
    """Measure in this process."""
    section, (inputs, target) = task.config.pipeline, next(task.batches(0, 1))
    rows = rows_of(as_call(inputs), target)
    first = spans(rows, section.microbatches)[0]
    with progress_of_samples("measuring layers", out) as show:
        return measure_profile(
            task.model(), piece(inputs, *first), piece(target, *first, rows), loss=task.loss, optimizer=task.optimizer,
            precision=task.precision, microbatches=section.microbatches, repetitions=request.flags["repetitions"],
            threads=request.flags["threads"], seed=section.seed, peers=peers, show=show,
        )  # fmt: skip


def work(request: Request) -> int:
    """Measure as one of several processes."""
    world = join()
    assert world is not None
    peers = Peers(world.gather, os.getppid())
    own = _measured(request.task(), request, peers, sys.stderr if rank() == 0 else None)
    every = [_from_json(json.loads(part)) for part in world.gather(json.dumps(_to_json(own)).encode())]
    if rank() == 0:
        result = replace(own, profile=combine_profiles([one.profile for one in every]))
        Path(request.flags["out"]).write_text(json.dumps(_to_json(result)), encoding="utf-8")
    return 0


def _to_json(result: MeasuredProfile) -> dict[str, Any]:
    return asdict(result) | {"profile": result.profile.to_json()}


def _from_json(data: dict[str, Any]) -> MeasuredProfile:
    return MeasuredProfile(**data | {"profile": Profile.from_json(data["profile"])})


if __name__ == "__main__":
    run_worker(work)
