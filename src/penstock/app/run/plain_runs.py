"""Time one plain process in a separate process, with one rank's threads and with those of all ranks together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

from penstock.app.run.outcome import Outcome, PlainRun
from penstock.app.run.plain import DISTURBED
from penstock.app.run.request import Request

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")


def plain_runs(outcome: Outcome, request: Request, steps: int) -> Outcome:
    """Return the outcome with the figures of plain training; without, where it could not be timed."""
    figures = _timed(request, steps, thread_counts(outcome))
    runs = [PlainRun(int(run["threads"]), float(run["seconds"]), int(run["memory"])) for run in figures]
    return replace(outcome, plain=tuple(run for run in runs if run.seconds < DISTURBED * runs[0].seconds))


def thread_counts(outcome: Outcome) -> list[int]:
    """Return the threads of one rank, and those of all ranks together where there are cores for them."""
    every = min(outcome.threads * len(outcome.memory), os.cpu_count() or 1)
    return sorted({outcome.threads, every})


def _timed(request: Request, steps: int, threads: list[int]) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "penstock.app.run.plain", request.config, "--changes", json.dumps(request.changes)]
    command += ["--steps", str(steps), "--threads", *map(str, threads)]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    out, none = subprocess.PIPE, subprocess.DEVNULL
    # Its input stays open as long as this process lives, and it ends when the input is closed.
    with subprocess.Popen(command, env=environment, stdin=out, stdout=out, stderr=none) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        ended: int = process.wait()
    return [] if ended else [json.loads(line) for line in output.splitlines() if line.startswith(b'{"threads": ')]
