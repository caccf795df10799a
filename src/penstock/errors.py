"""The exceptions that penstock raises on purpose.

PenstockError
├── InputError          an unusable value: states what was expected, what was received, and what to do
│   ├── ArgumentError   a call with an unknown argument or without a required one; also a TypeError
│   ├── FormatError     a file or text that cannot be read, with the position in it
│   └── SplitError      a model that cannot be split as requested, with the line of its code
├── ScheduleError       a schedule that breaks a law; carries all its faults
└── RankError           another rank failed, died, ended or does not respond: which one, where, and why

Every message states what was expected, what was received, and what to do next. The command line prints the message
alone and exits with code 2.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base class of all penstock errors."""


class InputError(PenstockError, ValueError):
    """An unusable value: what was expected, what was received, and what to do."""

    def __init__(self, expected: str, came: object, do: str) -> None:
        self.expected, self.came, self.do = expected, came, do
        super().__init__(f"expected {expected}, but got {came}; {do}")


class ArgumentError(InputError, TypeError):
    """A call with an unknown argument, or without a required one."""


class FormatError(InputError):
    """A file or a text that cannot be read; `where` is the position in it."""

    def __init__(self, where: str, expected: str, came: object, do: str) -> None:
        super().__init__(expected, came, do)
        self.where = where
        self.args = (f"{where}: {self.args[0]}",)


class SplitError(InputError):
    """A model that cannot be split as requested."""


class ScheduleError(PenstockError):
    """A schedule that breaks a law. `faults` lists every fault; the message shows each in its place."""

    def __init__(self, message: str, faults: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class RankError(PenstockError):
    """Another rank failed, died, ended too early or does not respond. `rank` is its number, or None if unknown."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class LeftAlone(RankError):
    """This rank left a training loop that other ranks continue."""
