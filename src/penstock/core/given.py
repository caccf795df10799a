"""What callers hand in: whole numbers, numbers, truths and JSON, or one message that says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import inf, log10
from os import PathLike
from typing import Any, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.errors import FormatError, InputError, PenstockError

Noun = TypeVar("Noun")
Numbers = float | Sequence[float] | npt.NDArray[np.float64]
LARGEST = 1e30  # of seconds, bytes and rates: products of larger ones overflow, and what follows makes no sense


def whole(what: str, value: object, least: int = 1, most: int | None = None) -> int:
    """A whole number of at least `least`; True and 4.0 are none."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InputError(f"{what} to be a whole number of at least {least}", shown(value), f"change {what}")
    if most is not None and value > most:
        raise InputError(f"{what} to be at most {most}", shown(int(value)), f"lower {what}")
    return int(value)


def truth(what: str, value: object) -> bool:
    """True or False; 'no' and 0 are none."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{what} to be True or False", repr(value), f"change {what}")
    return bool(value)


def number(what: str, value: object, do: str) -> None:
    """Refuse what is not one finite number of 0 or more; True and '1' are none."""
    if not (is_number(value) and 0 <= value < inf):
        raise InputError(f"{what} to be a number of 0 or more", shown(value), do)
    sized(what, value, do)


def sized(what: str, value: object, do: str, least: float = 0.0) -> None:
    """Refuse what is no number, or beyond all that is measured; 0, negative and infinite ones are for others to judge.

    `least` is the smallest that is not 0.
    """
    if not is_number(value):
        raise InputError(f"{what} to be a number", repr(value), do)
    if LARGEST < value < inf:
        raise InputError(f"{what} to be at most {LARGEST:g}", shown(value), do)
    if 0 < value < least:
        raise InputError(f"{what} to be at least {least:g}", value, do)


def is_number(value: object) -> TypeGuard[float]:
    """Comparisons alone may follow: a whole number can be too large to become a float."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def text(what: str, value: object, do: str) -> None:
    if not isinstance(value, str):
        raise InputError(f"{what} to be a text", repr(value), do)


def require_noun(value: object, kind: type, do: str) -> None:
    """Refuse what is no object of a class, such as its name, or the path of its file."""
    if not isinstance(value, kind):
        came = shown(value) if isinstance(value, (str, int)) else type(value).__name__
        raise InputError(f"a {kind.__name__}", came, do)


def require_path(value: object) -> None:
    if not isinstance(value, (str, PathLike)):
        raise InputError("the path of a file", shown(value), "give one")


def shown(value: object) -> str:
    """As repr, but whole numbers of very many digits, which Python may refuse to write, by their size."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"about {'-' if value < 0 else ''}1e{int(log10(abs(value)))}"
    return repr(value)


def numbers(what: str, value: object) -> npt.NDArray[np.float64]:
    """One number or several, finite and 0 or more, as an array of one dimension."""
    if isinstance(value, float) and 0 <= value <= LARGEST:  # nearly always, and ten times as fast
        return np.array([value])
    try:
        found = np.atleast_1d(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{what} to be a number, or a list of numbers", repr(value), f"correct {what}") from None
    if found.ndim != 1 or not (np.isfinite(found).all() and (found >= 0).all()):
        raise InputError(f"{what} to be finite and 0 or more", found.tolist(), f"correct {what}")
    if (found > LARGEST).any():
        raise InputError(f"{what} to be at most {LARGEST:g}", found.tolist(), f"correct {what}")
    return found


def column(what: str, values: object, length: int) -> npt.NDArray[np.float64]:
    """A list of so many finite numbers, as JSON has them; none so large that sums overflow."""
    if not isinstance(values, list) or len(values) != length:
        came = f"{len(values)} of them" if isinstance(values, list) else shown(values)
        raise InputError(f"{what} to be a list of {length} numbers", came, f"correct {what}")
    wrong = next((value for value in values if not is_number(value) or not -LARGEST <= value <= LARGEST), None)
    if wrong is not None or None in values:
        raise InputError(f"{what} to be finite numbers, at most {LARGEST:g}", shown(wrong), f"correct {what}")
    return np.array(values, dtype=np.float64)


def from_json_of(what: str) -> Callable[[Callable[[Any, Any], Noun]], Callable[[Any, Any], Noun]]:
    """Mark a noun's `from_json`: data that is not of its form gets one message, whatever is wrong with it."""

    def reader(read: Callable[[Any, Any], Noun]) -> Callable[[Any, Any], Noun]:
        @wraps(read)
        def checked(cls: Any, data: Any) -> Noun:
            try:
                return read(cls, data)
            except PenstockError:
                raise
            except KeyError as error:
                raise FormatError("JSON", f"the key {error} in a {what}", "none", "write it with to_json") from None
            except (TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
                raise FormatError("JSON", f"a {what} as to_json writes it", str(error), "correct the data") from None

        return checked

    return reader
