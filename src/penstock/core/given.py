"""What callers hand in: whole numbers, numbers and truths, or one message that says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError

Numbers = float | Sequence[float] | npt.NDArray[np.float64]


def whole(what: str, value: object, least: int = 1, most: int | None = None) -> int:
    """A whole number of at least `least`; True and 4.0 are none."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InputError(f"{what} to be a whole number of at least {least}", repr(value), f"change {what}")
    if most is not None and value > most:
        raise InputError(f"{what} to be at most {most}", value, f"lower {what}")
    return int(value)


def truth(what: str, value: object) -> bool:
    """True or False; 'no' and 0 are none."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{what} to be True or False", repr(value), f"change {what}")
    return bool(value)


def numbers(what: str, value: object) -> npt.NDArray[np.float64]:
    """One number or several, finite and 0 or more, as an array of one dimension."""
    try:
        found = np.atleast_1d(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError):
        raise InputError(f"{what} to be a number, or a list of numbers", repr(value), f"correct {what}") from None
    if found.ndim != 1 or not (np.isfinite(found).all() and (found >= 0).all()):
        raise InputError(f"{what} to be finite and 0 or more", found.tolist(), f"correct {what}")
    return found
