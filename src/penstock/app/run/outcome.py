"""The result of a training run: its losses and figures, beside those of one plain process."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

from penstock.core.timeline import Timeline
from penstock.reports.describe import amount, percent, printable, seconds


@dataclass(frozen=True)
class PlainRun:
    """The same training in one plain process for a few steps."""

    threads: int
    seconds: float  # of the median step
    memory: int  # peak bytes of training, without those of the interpreter


@dataclass(frozen=True)
class Validation:
    """The mean loss over the held-out data; for text, also its unigram entropy."""

    loss: float
    unigram_entropy: float | None = None

    def __str__(self) -> str:
        text = f"validation loss {self.loss:.4f}"
        if self.unigram_entropy is None:
            return text
        return f"{text} on held-out text, whose unigram entropy is {self.unigram_entropy:.4f}"


@dataclass(frozen=True)
class Outcome:
    """A training run. Times and memory are measured, the traffic counted."""

    losses: list[float]
    seconds: list[float]  # of every step
    memory: list[int]  # of every process, as in PlainRun
    traffic: int  # bytes between ranks in a step
    threads: int  # of a process
    timeline: Timeline | None = None  # of the last step; of the last run where steps follow without a flush
    predicted: Timeline | None = None  # of the same step, from those before it
    plain: tuple[PlainRun, ...] = ()
    checkpoint: str | None = None  # the last one written
    unsaved: tuple[str, ...] = ()  # those that could not be written
    begun: int = 0  # steps of earlier runs that this one continues
    batch: int = 0  # samples of a step
    validation: Validation | None = None
    sample: str | None = None  # text that the model generated at the end

    @property
    def step_range(self) -> str:
        """The number of steps; for a continued run, their range."""
        if not self.begun:
            return f"{len(self.losses)} steps"
        steps = self.begun + len(self.losses)
        return f"steps {self.begun + 1} to {steps}, {steps * self.batch:,} samples since the first"

    @property
    def step_seconds(self) -> float:
        """Median seconds of a step, without the first two, which warm up."""
        return median(self.seconds[2:] or self.seconds)

    def lines(self) -> list[str]:
        """Return the losses, the last checkpoint and the sample, for the text below the table."""
        lines = []
        if self.losses:
            ends = f"loss {self.losses[0]:.4f} at first, {self.losses[-1]:.4f} at last"
            lines.append(f"{ends}, {self.step_range}")
        if self.checkpoint is not None:
            lines.append(f"last checkpoint {printable(self.checkpoint)}")
        if self.validation is not None:
            lines.append(str(self.validation))
        if self.sample is not None:
            lines += ["a sample of what the model writes:", *printable(self.sample).splitlines()]
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "steps": self.begun + len(self.losses),
            "samples": (self.begun + len(self.losses)) * self.batch,
            "seconds_per_step": self.step_seconds,
            "memory": self.memory,
            "traffic": self.traffic,
            "timeline": None if self.timeline is None else self.timeline.figures(),
            "plain": [vars(run) for run in self.plain],
            "checkpoint": self.checkpoint,
            "unsaved": list(self.unsaved),
            "validation": None if self.validation is None else vars(self.validation),
            "sample": self.sample,
        }


def table(outcome: Outcome) -> Table:
    """Return time, bubble, memory and traffic, with the pipeline in the first column."""
    processes = len(outcome.memory)
    title = _column(f"{processes} workers" if processes > 1 else "pipeline in one process", outcome.threads, processes)
    result = Table("", title, *(_column("one plain process", run.threads) for run in outcome.plain))
    for column in result.columns[1:]:
        column.justify = "right"
    own, plain = outcome.step_seconds, outcome.plain
    line = outcome.timeline
    result.add_row("time per step", seconds(own), *(f"{seconds(run.seconds)}" for run in plain))
    if plain:
        result.add_row("speed beside it", "", *(f"{run.seconds / own:.2f} x" for run in plain))
    if line is not None:
        result.add_row("bubble", percent(line.bubble), *("none" for _ in plain))
    each = [amount(float(memory), True) for memory in outcome.memory]
    result.add_row("memory, each", "\n".join(each), *(amount(float(run.memory), True) for run in plain))
    result.add_row("traffic per step", amount(float(outcome.traffic), True), *("none" for _ in plain))
    return result


def _column(name: str, threads: int, processes: int = 1) -> str:
    each = " each" if processes > 1 else ""
    return f"{name},\n{threads} thread{'s' if threads > 1 else ''}{each}"
