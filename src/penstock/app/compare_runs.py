"""Several methods' training: one after the other in this process, or on workers that go from one to the next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.app.compare_memory import stage_bytes
from penstock.app.compare_methods import Method
from penstock.app.compare_run import FOUND, NOTES, REFUSED, Found, plain, reason, train
from penstock.app.launch import launch
from penstock.app.start import Request
from penstock.app.stopwatch import Stopwatch
from penstock.app.track import Track, following
from penstock.app.worker import command

WORDS = "words"  # the file of what workers say
ENDED = (129, 130, 143)  # codes of a launcher that was told to end: by SIGHUP, SIGINT, SIGTERM


@dataclass
class Run:
    """One method, as it was asked for and as it went: found, or a note why not."""

    method: Method
    request: Request
    track: Track
    found: Found | None = None
    note: str | None = None
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
        run.note = reason(error, len(run.track.losses))


def run_on_workers(runs: Sequence[Run], workers: int) -> None:
    """The plain process as a worker by itself, then all others; whoever fails ends the workers, and the rest starts
    anew."""
    for alone in (True, False):
        left = [run for run in runs if (run.method.schedule is None) is alone]
        while left:
            done = _launched(left, 1 if alone else workers, alone)
            left = left[done + 1 :]  # without the one that failed


def _launched(runs: Sequence[Run], workers: int, alone: bool) -> int:
    """How many of them were trained to the end; the next one then has a note."""
    with TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name)
        changes = [(number, run.request.changes) for number, run in enumerate(runs)]
        words = Request(runs[0].request.config, {}, {"out": name, "plain": alone, "runs": changes}).words()

        def take(line: str) -> None:
            number, loss, seconds = line.split()
            runs[int(number)].track.take(float(loss), float(seconds))

        with (folder / WORDS).open("w", encoding="utf-8") as said, following(folder / NOTES, take):
            code = launch(command("penstock.app.compare_run", words), workers, said)
        if code in ENDED:
            raise SystemExit(code)
        return _taken(runs, folder, failed=code != 0)


def _taken(runs: Sequence[Run], folder: Path, failed: bool) -> int:
    for number, run in enumerate(runs):
        file = folder / FOUND.format(number)
        if not file.exists():
            run.note = _why(folder, number)
            return number
        run.found = Found.from_json(json.loads(file.read_text(encoding="utf-8")))
    if failed:
        runs[-1].note = _why(folder, len(runs) - 1)
    return len(runs)


def _why(folder: Path, number: int) -> str:
    """What a rank has left behind, or else the last words."""
    for file in sorted(folder.glob(REFUSED.format(number, "*"))):
        return str(json.loads(file.read_text(encoding="utf-8")))
    said = [line for line in (folder / WORDS).read_text(encoding="utf-8").splitlines() if line.strip()]
    return said[-1] if said else "the workers ended without a word"
