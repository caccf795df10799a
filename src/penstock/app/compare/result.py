"""The result of a comparison, as a table, a page and JSON; and the causes of methods without figures."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass, field
from statistics import mean
from types import FrameType
from typing import Any

from rich.table import Table

from penstock.app.compare.memory import KINDS
from penstock.app.compare.methods import Method
from penstock.errors import InputError, PenstockError
from penstock.reports.describe import number, percent, seconds
from penstock.reports.loss_chart import LossCurve, loss_chart
from penstock.reports.table_page import table_page

FINITE = ("a finite loss", "finite gradients")  # the expectations in a pipeline's errors
DIVERGED = "diverged"
_LIBRARIES = ("torch", "penstock", "runpy", "contextlib", "functools", "importlib", "_frozen_importlib")


@dataclass(frozen=True)
class Cause:
    """The cause why a method has no figures. `failed`: an exception of the user's code, or a rank that died; else the
    method cannot run, or diverged."""

    note: str
    failed: bool = False
    traceback: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cause:
        return cls(str(data["note"]), bool(data["failed"]), str(data["traceback"]))

    @property
    def diverged(self) -> bool:
        return self.note.startswith(DIVERGED)


def cause_of(error: Exception, done: int) -> Cause:
    """Return the cause for an exception after `done` mini-batches."""
    if isinstance(error, InputError):
        if error.expected in FINITE:
            return Cause(f"{DIVERGED} after {plural(done, 'mini-batch')}")
        return Cause(f"expected {error.expected}, but got {error.came}")
    if isinstance(error, PenstockError):
        return Cause(str(error))
    last = "".join(traceback.format_exception_only(error)).strip()
    return Cause(f"{last}, at {place_of(error)}", True, "".join(traceback.format_exception(error)))


def place_of(error: BaseException) -> str:
    """Return file, line and function of the innermost call in the user's code, or of the innermost call at all."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    user_frames = [(frame, line) for frame, line in frames if _module(frame).split(".")[0] not in _LIBRARIES]
    if not frames:
        return "an unknown line"
    frame, line = (user_frames or frames)[-1]
    return f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}es"


def _module(frame: FrameType) -> str:
    """Return the name of a frame's module, also of one started by `python -m`."""
    spec = frame.f_globals.get("__spec__")
    return str(spec.name if spec is not None else frame.f_globals.get("__name__", ""))


MIB = 1 << 20
HEADS = ("method", "samples/s", "busy", *KINDS, "in all", "loss", "time")
WIDTH = 132  # of a table that is not printed on a terminal


@dataclass(frozen=True)
class Row:
    """The figures of one method. With a `cause`, there are none but the losses and times until it ended."""

    method: Method
    losses: list[float]
    seconds: list[float]  # from the start of the run to the end of each mini-batch
    pace: float | None = None  # seconds of a mini-batch in the steady state
    utilisation: float | None = None
    memory: dict[str, float] = field(default_factory=dict)  # bytes on the fullest rank, by kind
    cause: Cause | None = None

    @property
    def note(self) -> str | None:
        return None if self.cause is None else self.cause.note

    @property
    def loss(self) -> float | None:
        """Mean of the last tenth of the mini-batches."""
        return mean(self.losses[-max(1, len(self.losses) // 10) :]) if self.losses and self.note is None else None


@dataclass(frozen=True)
class Comparison:
    """The rows, and the settings that all of them share."""

    rows: list[Row]
    clock: str  # label for how times were determined: measured, or simulated
    how: str  # the same in full
    stages: int
    microbatches: int
    batch: int  # samples of a mini-batch
    steps: int
    replicas: list[int] = field(default_factory=list)  # of every rank

    @property
    def title(self) -> str:
        count = "one stage" if self.stages == 1 else f"{self.stages} stages"
        if max(self.replicas, default=1) > 1:
            count += f" of {':'.join(map(str, self.replicas))} replicas"
        parts = f"{count}, mini-batches of {self.batch} in {plural(self.microbatches, 'micro-batch')}"
        return f"{parts}, {self.steps * self.batch:,} samples"

    @property
    def notes(self) -> list[str]:
        return [f"{row.method.name}: {row.note}" for row in self.rows if row.note is not None]

    @property
    def failed(self) -> bool:
        """Whether a method was ended by an exception or a dead rank, or none could be trained."""
        return any(row.cause is not None and row.cause.failed for row in self.rows) or all(
            row.cause is not None for row in self.rows
        )

    def tracebacks(self) -> list[str]:
        """Return each distinct traceback once, under the names of the methods that it ended."""
        names: dict[str, list[str]] = {}
        texts: dict[str, str] = {}
        for row in self.rows:
            if row.cause is not None and row.cause.traceback:
                names.setdefault(row.cause.note, []).append(row.method.name)
                texts.setdefault(row.cause.note, row.cause.traceback)
        return [f"{', '.join(names[note])}:\n{text.rstrip()}" for note, text in texts.items()]

    def cells(self, row: Row) -> list[str]:
        """Return the cells of a method's row in the table, memory in MiB."""
        if row.cause is not None:
            outcome = DIVERGED if row.cause.diverged else "failed" if row.cause.failed else "not run"
            return [row.method.name, *("-" for _ in HEADS[1:-2]), outcome, "-"]
        assert row.pace is not None
        memory = [row.memory[kind] for kind in KINDS]
        return [
            row.method.name,
            number(self.batch / row.pace) if row.pace > 0 else "-",
            "-" if row.utilisation is None else percent(row.utilisation),
            *(number(held / MIB) if held >= MIB / 1000 else "0" for held in (*memory, sum(memory))),
            _loss(row.loss),
            seconds(row.seconds[-1]),
        ]

    def table(self) -> Table:
        table = Table(*HEADS, box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in self.rows:
            table.add_row(*self.cells(row))
        return table

    def captions(self) -> list[str]:
        """Return the lines that explain the table."""
        return [self.how, "memory in MiB, of the fullest rank; loss: mean of the last tenth of the run", *self.notes]

    def svg(self) -> str:
        return loss_chart([self._curve(row) for row in self.rows], self.title, self.clock)

    def html(self) -> str:
        return table_page(self.title, self.captions(), HEADS, [self.cells(row) for row in self.rows], [self.svg()])

    def to_json(self) -> dict[str, Any]:
        plain = {
            name: getattr(self, name)
            for name in ("clock", "how", "stages", "replicas", "microbatches", "batch", "steps")
        }
        return plain | {"samples": self.steps * self.batch, "methods": [self._json(row) for row in self.rows]}

    def _json(self, row: Row) -> dict[str, Any]:
        return {
            "name": row.method.name,
            "schedule": row.method.schedule,
            "options": row.method.options,
            "note": row.note,
            "failed": row.cause is not None and row.cause.failed,
            "samples_per_second": self.batch / row.pace if row.pace else None,
            "utilisation": row.utilisation,
            "memory": row.memory,
            "final_loss": row.loss,
            "losses": row.losses,
            "seconds": row.seconds,
        }

    def _curve(self, row: Row) -> LossCurve:
        samples = [self.batch * (at + 1) for at in range(len(row.losses))]
        return LossCurve(row.method.name, samples, row.seconds, row.losses)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"
