"""NumPy's global random state, kept and put back in microseconds.

NumPy's own way copies 624 numbers one by one, which takes longer than all else around a small mini-batch. The numbers
lie in memory in one piece. Beside them NumPy may keep the second half of a pair of normal numbers, which only its own
way tells: it is asked whenever the numbers are not those that were found without such a half before.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

BYTES = 624 * 4 + 4  # of the numbers, and of the place of the next among them
State = bytes | tuple[Any, ...]  # the numbers alone, or all that NumPy tells

_whole = b""  # numbers that were found without half a pair


def save() -> State:
    """What is there now."""
    global _whole
    now = _numbers()
    if now is not None and now == _whole:
        return now
    told: tuple[Any, ...] = np.random.get_state()  # type: ignore[assignment]
    name, key, place, half, _ = told
    if now is None or name != "MT19937" or half or now != key.tobytes() + struct.pack("=i", place):
        return told
    _whole = now
    return now


def restore(state: State) -> None:
    """What was saved, whatever was drawn since."""
    address = _address()
    if isinstance(state, tuple):
        np.random.set_state(state)
    elif address is not None:
        np.random.seed(0)  # forgets half a pair
        ctypes.memmove(address, state, BYTES)
    else:  # another generator has taken its place: NumPy says what it thinks of that
        key, (place,) = np.frombuffer(state[:-4], np.uint32), struct.unpack("=i", state[-4:])
        np.random.set_state(("MT19937", key, place, 0, 0.0))


def _numbers() -> bytes | None:
    address = _address()
    return None if address is None else ctypes.string_at(address, BYTES)


def _address() -> int | None:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return generator.ctypes.state_address if type(generator) is np.random.MT19937 else None
