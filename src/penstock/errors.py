"""Every exception that penstock raises on purpose.

PenstockError
├── InputError          a value that cannot be used: what was expected, what came, what to do
│   ├── ArgumentError   a call with an argument that there is not, or without one that there must be; a TypeError too
│   ├── FormatError     a file or text that cannot be read, with the place in it
│   └── SplitError      a model that cannot be split as asked, with the line of its code
├── ScheduleError       a schedule that breaks a law; carries every fault found
└── RankError           another rank has failed, died, ended or gives no answer: which one, where, and why

A message always says what was expected, what came, and what to do next. The command line prints the message alone
and leaves with code 2.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Root of the tree: catch this to catch all of penstock's own errors."""


class InputError(PenstockError, ValueError):
    """A value that cannot be used."""

    def __init__(self, expected: str, came: object, do: str) -> None:
        self.expected, self.came, self.do = expected, came, do
        super().__init__(f"expected {expected}, but got {came}; {do}")


class ArgumentError(InputError, TypeError):
    """A call with an argument that the function does not take, or without one that it needs."""


class FormatError(InputError):
    """A file or a text that cannot be read; `where` names the place in it."""

    def __init__(self, where: str, expected: str, came: object, do: str) -> None:
        super().__init__(expected, came, do)
        self.where = where
        self.args = (f"{where}: {self.args[0]}",)


class SplitError(InputError):
    """A model that cannot be split as asked."""


class ScheduleError(PenstockError):
    """A schedule that breaks a law. `faults` lists all that were found; the message draws them."""

    def __init__(self, message: str, faults: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class RankError(PenstockError):
    """Another rank has failed, died, ended too early or gives no answer. `rank` is the one at fault, where known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class LeftAlone(RankError):
    """This rank has left a training loop that others go on with."""
