"""Progress of a run: a bar on a terminal, plain lines elsewhere, nothing on ranks other than the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Show(Protocol):
    """A callback after each step."""

    def __call__(self, done: int, loss: float) -> None:
        """Show that `done` steps are done, the last with this loss."""


@contextmanager
def progress(steps: int, log_every: int, out: TextIO | None, begun: int = 0) -> Iterator[Show]:
    """Show the progress of a run of `steps` steps, of which an earlier run has done `begun`."""
    if out is None:
        yield lambda done, loss: None
    elif out.isatty():
        with _bar(out) as bar:
            task = bar.add_task("training", total=steps, completed=begun, loss="-", rate="-")
            since = perf_counter()

            def show(done: int, loss: float) -> None:
                bar.update(task, completed=done, loss=f"{loss:.4f}", rate=_rate(done - begun, since))

            yield show
    else:
        yield _Lines(steps, log_every, out, begun)


class ShowMany(Protocol):
    """A callback after each step of one of several runs."""

    def __call__(self, name: str, before: int, done: int, loss: float) -> None:
        """Show that `done` steps of the run `name` are done, after `before` steps of other runs."""


@contextmanager
def progress_of_many(runs: int, steps: int, out: TextIO | None) -> Iterator[ShowMany]:
    """Show the progress of several runs of `steps` steps each: one bar, or a line for each run that is done."""
    if out is None:
        yield lambda name, before, done, loss: None
    elif out.isatty():
        with _bar(out) as bar:
            task = bar.add_task("", total=runs * steps, loss="-", rate="-")
            begun = perf_counter()

            def show(name: str, before: int, done: int, loss: float) -> None:
                all_done = before + done
                bar.update(task, completed=all_done, description=name, loss=f"{loss:.4f}", rate=_rate(all_done, begun))

            yield show
    else:

        def show_line(name: str, before: int, done: int, loss: float) -> None:
            if done == steps:
                print(f"{name}: {steps} mini-batches, loss {loss:.4f}", file=out, flush=True)

        yield show_line


@contextmanager
def progress_of_samples(what: str, out: TextIO | None) -> Iterator[Callable[[int, int], None]]:
    """Show the number of samples measured; without a terminal, only the start of the measurement."""
    if out is None or not out.isatty():
        if out is not None:
            print(what, file=out, flush=True)
        yield lambda done, total: None
        return
    with Bar(*_counting(), TimeRemainingColumn(), console=Console(file=out)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _counting() -> tuple[ProgressColumn, ...]:
    return TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()


class _Lines:
    """Progress as a line for the first step, for every `log_every` steps, and for the last."""

    def __init__(self, steps: int, log_every: int, out: TextIO, begun: int) -> None:
        self.steps, self.log_every, self.out, self.begun, self.since = steps, log_every, out, begun, perf_counter()

    def __call__(self, done: int, loss: float) -> None:
        new = done - self.begun
        if new == 1 or done == self.steps or done % self.log_every == 0:
            left = (perf_counter() - self.since) / new * (self.steps - done)
            line = f"step {done}/{self.steps}  loss {loss:.4f}  {_rate(new, self.since)}  {left:.0f} s left"
            print(line, file=self.out, flush=True)


def _bar(out: TextIO) -> Bar:
    return Bar(
        *_counting(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(file=out),
    )


def _rate(done: int, begun: float) -> str:
    return f"{done / max(perf_counter() - begun, 1e-9):.1f} steps/s"
