"""Why a method of a comparison has no figures: one line for the table, and the traceback of an exception."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from penstock.errors import InputError, PenstockError

FINITE = ("a finite loss", "finite gradients")  # that a pipeline expects
DIVERGED = "diverged"
_LIBRARIES = ("torch", "penstock", "runpy", "contextlib", "functools", "importlib", "_frozen_importlib")


@dataclass(frozen=True)
class Cause:
    """`failed`: by an exception of the user's code, or by a rank that died; else the method cannot run, or diverged."""

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
    """The cause that an exception is, after so many mini-batches."""
    if isinstance(error, InputError):
        if error.expected in FINITE:
            return Cause(f"{DIVERGED} after {plural(done, 'mini-batch')}")
        return Cause(f"expected {error.expected}, but got {error.came}")
    if isinstance(error, PenstockError):
        return Cause(str(error))
    last = "".join(traceback.format_exception_only(error)).strip()
    return Cause(f"{last}, at {place_of(error)}", True, "".join(traceback.format_exception(error)))


def place_of(error: BaseException) -> str:
    """File, line and function of the innermost call in the user's code; of the innermost at all where none is."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    theirs = [(frame, line) for frame, line in frames if _module(frame).split(".")[0] not in _LIBRARIES]
    if not frames:
        return "an unknown line"
    frame, line = (theirs or frames)[-1]
    return f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}es"


def _module(frame: FrameType) -> str:
    """The name of a frame's module, also of one that was started by `python -m`."""
    spec = frame.f_globals.get("__spec__")
    return str(spec.name if spec is not None else frame.f_globals.get("__name__", ""))
