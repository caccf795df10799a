"""Several methods' training: one after the other in this process, or on workers that go from one to the next."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.app.compare_cause import Cause, cause_of
from penstock.app.compare_memory import stage_bytes
from penstock.app.compare_methods import Method
from penstock.app.compare_run import FOUND, NOTES, REFUSED, Found, plain, train
from penstock.app.launch import launch
from penstock.app.start import Request
from penstock.app.stopwatch import Stopwatch
from penstock.app.track import Track, following
from penstock.app.worker import command

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
            code = launch(command("penstock.app.compare_run", words), workers, said)
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
