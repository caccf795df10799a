"""Install the stand-ins, and remove them.

The functions themselves are replaced. A TorchFunctionMode is not sufficient: it is off inside a backward, so that a
recomputation would be wrong without an error, and it does not intercept the functions that multi-head attention calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.model.split_backward import threads
from penstock.model.split_backward.queue import WeightQueue
from penstock.model.split_backward.stand_ins import PLACES

_lock = threading.Lock()
_users = 0  # in all threads


@contextmanager
def deferring(queue: WeightQueue) -> Iterator[None]:
    """Defer weight gradients: in a stage's forward, and in its backward, where checkpoints run the forward again."""
    _count(1)
    threads.own.queues.append(queue)
    try:
        yield
    finally:
        threads.own.queues.pop()
        queue.casts.clear()
        _count(-1)


def _count(change: int) -> None:
    global _users
    with _lock:
        before, _users = _users, _users + change
        if before == 0 or _users == 0:
            _exchange(put=before == 0)


def _exchange(put: bool) -> None:
    for place, name, torchs, ours in PLACES:
        before, after = (torchs, ours) if put else (ours, torchs)
        if getattr(place, name) is before:  # functions replaced by others are left alone
            setattr(place, name, after)
