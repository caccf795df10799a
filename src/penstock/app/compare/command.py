"""`penstock compare`: train the same model on the same data with the same seed and budget by one method after another.

Where there are cores for all stages, the methods run on workers and their times are measured. Otherwise they run
inline, which trains the same numbers, and the schedule is simulated with the measured times of their stages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TextIO

import torch

from penstock.app.compare.memory import footprint, peak_rank_memory
from penstock.app.compare.methods import Method, choose_methods
from penstock.app.compare.result import Comparison, Row, cause_of
from penstock.app.compare.runs import MethodRun, run_inline, run_on_workers
from penstock.app.compare.setup import Setup, batch_rows, require_own_stages, require_rate
from penstock.app.compare.stopwatch import measured_costs
from penstock.app.compare.times import pace, simulated
from penstock.app.compare.track import Track
from penstock.app.run.progress import ShowMany, progress_of_many
from penstock.app.run.request import Request, launched
from penstock.comm.world.host import cores
from penstock.errors import InputError


@dataclass(frozen=True)
class CompareOptions:
    """Options beside the config: methods by name, T1's K and T3's N, and whether to stay in one process."""

    methods: Sequence[str] | None = None
    t1: int | None = None
    t3: int | None = None
    inline: bool = False


def compare(request: Request, options: CompareOptions, out: TextIO | None = None) -> Comparison:
    """Train by each method, and report progress to `out`."""
    if launched():
        came = f"{os.environ['WORLD_SIZE']} that were launched together"
        raise InputError("one process for compare, which starts its own workers", came, "run it without torchrun")
    task = request.task()
    require_rate(request.config, task)
    require_own_stages(request.config, task)
    setup, section = Setup(request, task.config), task.config.pipeline
    methods = choose_methods(
        setup.usual() if options.methods is None else options.methods, setup.steps, options.t1, options.t3
    )
    setup.prepare(methods)
    workers = section.workers if _on_workers(section.workers, options.inline) else 0
    with progress_of_many(len(methods), setup.steps, out) as show:
        runs = [_run(setup, method, at, show) for at, method in enumerate(methods)]
        able = [run for run in runs if run.cause is None]
        if workers:
            run_on_workers(able, workers)
        else:
            for run in able:
                run_inline(run)
    rows = [_row(setup, run, runs) for run in runs]
    counts = (section.stages, section.microbatches, batch_rows(task), setup.steps)
    return Comparison(rows, *_clock(workers), *counts, replicas=section.counts)


def _on_workers(workers: int, inline: bool) -> bool:
    return not inline and 2 <= workers <= cores()


def _clock(workers: int) -> tuple[str, str]:
    """Return how times were determined, as a label and in full."""
    if workers:
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        short = f"measured on {workers} workers"
        return short, f"times {short}, the plain process's on one; threads of each: {threads}"
    return "simulated", (
        "times simulated from stage times measured inline, transfers and reductions taking none; the plain process's "
        f"measured; threads: {torch.get_num_threads()}"
    )


def _run(setup: Setup, method: Method, at: int, show: ShowMany) -> MethodRun:
    """Return a run that is ready to train, or that has the cause why it cannot."""
    show_step = partial(show, method.name, at * setup.steps)
    run = MethodRun(method, setup.request(method), Track(show_step))
    try:
        run.request.task()
        setup.stage_activations(method)
    except Exception as error:
        run.cause = cause_of(error, 0)
    return run


def _row(setup: Setup, run: MethodRun, runs: Sequence[MethodRun]) -> Row:
    """Return the figures of a run. Times of an inline run are simulated from all runs with the same stages."""
    method, track, result = run.method, run.track, run.result
    if result is None or run.cause is not None:
        return Row(method, track.losses, track.seconds, cause=run.cause)
    task, activations = run.request.task(), setup.stage_activations(method)
    built, again = setup.build_schedule(method, task), task.config.pipeline.recompute != "never"
    memory = peak_rank_memory(built, setup.steps, activations, result.stages, again)
    done, busy = track.seconds, result.utilisation
    if run.watch is not None:
        stages = setup.stages_of(method)
        alike = [one.watch for one in runs if one.watch is not None and setup.stages_of(one.method) == stages]
        costs = measured_costs(built.shape, run.watch, alike, footprint(activations, result.stages), again)
        done, busy = simulated(built, costs, setup.steps, method.flushed)
    return Row(method, track.losses, done, pace(done, task.config.pipeline.stages, method.flushed), busy, memory)
