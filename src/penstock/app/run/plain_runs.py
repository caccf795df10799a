"""One plain process, timed in a process of its own: with a rank's threads, and with those of all ranks together."""

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
    """The outcome with what plain training takes; without, where that could not be found out."""
    found = _timed(request, steps, thread_counts(outcome))
    runs = [PlainRun(int(run["threads"]), float(run["seconds"]), int(run["memory"])) for run in found]
    return replace(outcome, plain=tuple(run for run in runs if run.seconds < DISTURBED * runs[0].seconds))


def thread_counts(outcome: Outcome) -> list[int]:
    """Those of one rank, and as many as all ranks have together, where there are cores for them."""
    every = min(outcome.threads * len(outcome.memory), os.cpu_count() or 1)
    return sorted({outcome.threads, every})


def _timed(request: Request, steps: int, threads: list[int]) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "penstock.app.run.plain", request.config, "--changes", json.dumps(request.changes)]
    command += ["--steps", str(steps), "--threads", *map(str, threads)]
    around = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    out, none = subprocess.PIPE, subprocess.DEVNULL
    # Its input stays open for as long as this process lives: that is how it knows.
    with subprocess.Popen(command, env=around, stdin=out, stdout=out, stderr=none) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        ended: int = process.wait()
    return [] if ended else [json.loads(line) for line in said.splitlines() if line.startswith(b'{"threads": ')]
