"""`penstock train`: train from a config, and report the result on the first rank.

The command starts workers that run this module (worker_main.py), or runs it in its own process.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import TextIO

import torch
from rich.console import Console

from penstock.app.config.schema import PipelineSection
from penstock.app.config.task import Task
from penstock.app.run.checkpoints import PeriodicCheckpoints
from penstock.app.run.lasting_output import LastingOutput
from penstock.app.run.outcome import Outcome, table
from penstock.app.run.plain_runs import plain_runs, thread_counts
from penstock.app.run.progress import progress
from penstock.app.run.request import Request, rank, run_worker
from penstock.app.run.validation import require_validation, sample, traffic, validate
from penstock.comm.watch.stderr import write_stderr
from penstock.core.timeline import Timeline
from penstock.engine.measure.peak_memory import highest, resident
from penstock.errors import InputError
from penstock.schedules.registry import METHODS
from penstock.training.checkpoint.kept_steps import require_steps_left, resumed_from
from penstock.training.pipeline import Pipeline

PREDICT_FROM = 3  # steps: one to warm up, one to predict from, one to predict


def train(request: Request) -> int:
    """Train, and report the result on the first rank. Return 1 if some output could not be written."""
    results = LastingOutput(sys.stdout, "standard output")
    messages = LastingOutput(sys.stderr, "standard error") if request.flags.get("json") else results
    task = request.task()
    require_writable(task.config.training.report)
    if rank() != 0:
        run(task)
        return 0
    _warn_asynchronous(task.config.pipeline, messages.text)
    outcome = _with_plain(run(task, messages.text), request, task, messages.text)
    written = _report(outcome, task, messages.text)
    if request.flags.get("json"):
        print(json.dumps(outcome.to_json()), file=results.text, flush=True)
    if outcome.unsaved:
        write_stderr(f"penstock: {len(outcome.unsaved)} checkpoints are missing: {', '.join(outcome.unsaved)}\n")
    return int(results.failed or not written or bool(outcome.unsaved))


def run(task: Task, out: TextIO | None = None) -> Outcome:
    """Train as configured. Every rank runs this and returns the same outcome."""
    settings, before = task.config.training, resident()
    require_validation(task)
    pipe = task.pipeline()
    begun = _resume(pipe, resumed_from(settings.resume, settings.checkpoint), settings.steps)
    left = settings.steps - begun
    losses, seconds = [], []
    kept = PeriodicCheckpoints(pipe, settings.checkpoint, settings.checkpoint_every, settings.steps, settings.keep)
    kept.require_room()
    with progress(settings.steps, settings.log_every, out, begun) as show:
        clock = perf_counter()
        for step in pipe.train(task.batches(begun, left)):
            now = perf_counter()
            seconds.append(now - clock)
            losses.append(step.loss)
            show(begun + len(losses), step.loss)
            kept.after(begun + len(losses))
            clock = perf_counter()
    timed = pipe.clock is not None and pipe.async_trainer is None and not pipe.ranks.alone
    measured = pipe.measured() if timed and losses else None
    whole = pipe.ranks.world.gather(str(max(0, highest() - before)).encode())
    return Outcome(
        losses,
        seconds,
        [int(memory) for memory in whole] if measured is None else [int(rank.measured) for rank in measured.memory()],
        traffic(pipe, settings.batch),
        torch.get_num_threads(),
        last_run(pipe) if measured is None else measured.timeline(),
        None if measured is None or len(losses) < PREDICT_FROM else measured.predicted(),
        checkpoint=kept.last,
        unsaved=tuple(kept.failed),
        begun=begun,
        batch=settings.batch,
        validation=validate(pipe, task),
        sample=sample(pipe, task),
    )


def _warn_asynchronous(section: PipelineSection, messages: TextIO) -> None:
    """Warn if a plan's schedule is asynchronous: the config does not show it."""
    if section.plan is not None and METHODS[section.schedule].asynchronous:
        warning = (
            f"{section.plan}: its schedule, {section.schedule}, is asynchronous: gradients are taken from older weights"
        )
        print(f"{warning}, so this does not train as one device would", file=messages, flush=True)


def _resume(pipe: Pipeline, path: str | None, steps: int) -> int:
    """Load the checkpoint, if one is given, and return the steps already done."""
    if path is not None:
        pipe.load(path)
    require_steps_left(pipe.index, steps, path)
    return pipe.index


def last_run(pipe: Pipeline) -> Timeline | None:
    """Return the timeline of the last run without a flush; None where all steps had one, or it was too long to record.
    Every rank has to call."""
    clock = pipe.clock
    if clock is None or pipe.async_trainer is None or pipe.ranks.alone:
        return None
    pipe.settle()
    whole = pipe.ranks.world.gather(b"whole" if clock.runs else b"")
    return pipe.timeline() if all(whole) else None


def _with_plain(outcome: Outcome, request: Request, task: Task, messages: TextIO) -> Outcome:
    """Return the outcome with the figures of one plain process, if the config asks for them."""
    steps = task.config.training.plain_steps
    if not steps:
        return outcome
    print("timing one plain process, to compare with", file=messages, flush=True)
    compared = plain_runs(outcome, request, steps)
    if not compared.plain:
        print(f"it could not be timed; python -m penstock.app.run.plain {request.config} says why", file=messages)
    elif len(compared.plain) < len(thread_counts(outcome)):
        print("with more threads it was disturbed by other work on this machine: left out", file=messages)
    return compared


def _report(outcome: Outcome, task: Task, messages: TextIO) -> bool:
    """Print the result, and write the report if one was requested. Return whether it could be written."""
    report = task.config.training.report
    console = Console(file=messages)
    console.print(table(outcome))
    for line in outcome.lines():
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if report is not None and outcome.timeline is not None:
        from penstock.reports.html import html

        lines = (("predicted from the steps before", outcome.predicted), ("measured", outcome.timeline))
        shown = [(label, line) for label, line in lines if line is not None]
        try:
            Path(report).write_text(html(shown, outcome.lines()), encoding="utf-8")
        except OSError as error:
            write_stderr(f"penstock: the report {report} could not be written: {error.strerror}\n")
            return False
        console.print(f"wrote {report}", highlight=False, soft_wrap=True)
    return True


def require_writable(path: str | None, what: str = "a report") -> None:
    """Raise, before the training, if a file cannot be written."""
    if path is None:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        _open_once(path)
    except OSError as error:
        raise InputError(f"{what} that can be written", f"{path}: {error.strerror}", "change the path") from None


def _open_once(path: str) -> None:
    """Create the file and remove it again, while other ranks may do the same: only the rank that created it removes
    it."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        Path(path).unlink()
    except FileExistsError:
        with suppress(FileNotFoundError):  # another rank has removed it, so it can be created
            os.close(os.open(path, os.O_WRONLY))


if __name__ == "__main__":
    run_worker(train)
