"""Why the run has to end: told by the rank that found it, passed on to all others as plain text."""

from __future__ import annotations

import json
import os
import re
import traceback
from dataclasses import asdict, dataclass
from types import TracebackType

LIMIT = 48_000  # bytes of a told failure: what a board has room for


@dataclass(frozen=True)
class Failure:
    """`rank` is the one at fault; `line` is one line for every rank; `silent` are ranks that give no sign of life.

    `mendable`: an exception, which the scripts may catch on all ranks, to make another pipeline. `renewal`: in the run
    as it was joined anew for that pipeline; 0 at first.
    """

    rank: int
    line: str
    silent: tuple[int, ...] = ()
    mendable: bool = False
    renewal: int = 0

    def encode(self) -> bytes:
        short = self.line if len(self.line) < LIMIT // 8 else self.line[: LIMIT // 8] + " ..."
        return json.dumps(asdict(self) | {"line": short}).encode()

    @staticmethod
    def decode(data: bytes) -> Failure:
        told = json.loads(data)
        silent = tuple(int(rank) for rank in told["silent"])
        return Failure(int(told["rank"]), str(told["line"]), silent, bool(told["mendable"]), int(told["renewal"]))


def full_traceback(error: BaseException) -> str:
    """As Python prints it, with the calls above the place that caught it, which are still under way."""
    drawn = traceback.TracebackException.from_exception(error)
    frames = _above(error.__traceback__)
    drawn.stack = traceback.StackSummary.from_list([*frames, *drawn.stack])
    return "".join(drawn.format())


def leave_for_torchrun(error: BaseException) -> None:
    """Else it names the rank that happened to end first as the cause."""
    if isinstance(error, Exception) and os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        trace = error.__traceback__
        try:
            raise error  # it writes down what is being handled
        except Exception:
            get_error_handler().record_exception(error)
        finally:
            error.__traceback__ = trace


def one_line(error: BaseException) -> str:
    """The exception as its traceback's last line, shortened."""
    text = "".join(traceback.format_exception_only(error)).strip()
    text = re.sub(r"\[/\S+\.cc:\d+\] ", "", text).split(" This is typically caused")[0]  # gloo's asides
    first, *rest = text.split("\n")
    return first + (" ..." if rest else "")


def _above(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    if trace is None or trace.tb_frame.f_back is None:
        return []
    return list(traceback.extract_stack(trace.tb_frame.f_back))
