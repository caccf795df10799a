"""Validation of arguments and JSON data: whole numbers, numbers, booleans and texts."""

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
LARGEST = 1e30  # of seconds, bytes and rates: products of larger ones overflow


def whole(what: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return `value` if it is a whole number from `least` to `most`, else raise InputError, also for True and 4.0."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InputError(f"{what} to be a whole number of at least {least}", shown(value), f"change {what}")
    if most is not None and value > most:
        raise InputError(f"{what} to be at most {most}", shown(int(value)), f"lower {what}")
    return int(value)


def truth(what: str, value: object) -> bool:
    """Return `value` if it is True or False, else raise InputError; 'no' and 0 are refused."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{what} to be True or False", repr(value), f"change {what}")
    return bool(value)


def number(what: str, value: object, do: str) -> None:
    """Raise InputError unless `value` is a finite number of 0 or more; True and '1' are refused."""
    if not (is_number(value) and 0 <= value < inf):
        raise InputError(f"{what} to be a number of 0 or more", shown(value), do)
    sized(what, value, do)


def sized(what: str, value: object, do: str, least: float = 0.0) -> None:
    """Raise InputError unless `value` is a number, not above LARGEST if finite, and not between 0 and `least`.

    Negative and infinite numbers are accepted; callers check those.
    """
    if not is_number(value):
        raise InputError(f"{what} to be a number", repr(value), do)
    if LARGEST < value < inf:
        raise InputError(f"{what} to be at most {LARGEST:g}", shown(value), do)
    if 0 < value < least:
        raise InputError(f"{what} to be at least {least:g}", value, do)


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a number, which may only be compared: a whole number can be too large for a float."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def text(what: str, value: object, do: str) -> None:
    """Raise InputError unless `value` is a text."""
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
    """Return the repr of a value, or the magnitude of a whole number with too many digits for Python to print."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"about {'-' if value < 0 else ''}1e{int(log10(abs(value)))}"
    return repr(value)


def numbers(what: str, value: object) -> npt.NDArray[np.float64]:
    """Return one number or a sequence of them, finite and 0 or more, as an array of one dimension."""
    if isinstance(value, float) and 0 <= value <= LARGEST:  # the most frequent case, ten times as fast this way
        return np.array([value])
    try:
        values = np.atleast_1d(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{what} to be a number, or a list of numbers", repr(value), f"correct {what}") from None
    if values.ndim != 1 or not (np.isfinite(values).all() and (values >= 0).all()):
        raise InputError(f"{what} to be finite and 0 or more", values.tolist(), f"correct {what}")
    if (values > LARGEST).any():
        raise InputError(f"{what} to be at most {LARGEST:g}", values.tolist(), f"correct {what}")
    return values


def column(what: str, values: object, length: int) -> npt.NDArray[np.float64]:
    """Return a JSON list of `length` finite numbers as an array; numbers so large that sums overflow are refused."""
    if not isinstance(values, list) or len(values) != length:
        came = f"{len(values)} of them" if isinstance(values, list) else shown(values)
        raise InputError(f"{what} to be a list of {length} numbers", came, f"correct {what}")
    wrong = next((value for value in values if not is_number(value) or not -LARGEST <= value <= LARGEST), None)
    if wrong is not None or None in values:
        raise InputError(f"{what} to be finite numbers, at most {LARGEST:g}", shown(wrong), f"correct {what}")
    return np.array(values, dtype=np.float64)


def from_json_of(what: str) -> Callable[[Callable[[Any, Any], Noun]], Callable[[Any, Any], Noun]]:
    """Decorate a `from_json` class method: malformed data raises FormatError with one message."""

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
