"""A lane through memory that two processes of one host share; here is the part that its two ends have in common.

The sender copies every tensor once, into a slot; the receiver's tensors are that slot. When the last of them is
garbage, the slot goes back to the sender. Nothing has a name in the file system: the receiver opens the sender's memory
through /proc, which the kernel allows to processes of the same user, and when both have ended, however they ended, the
memory is free. A forked child has no part in it.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from penstock.comm.transport.interface import LaneName
from penstock.errors import PenstockError


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Elsewhere(Exception):
    """Not an error: the message that was asked for comes by another lane, for want of shared memory."""


class End:
    """Open until it is closed, or until it finds itself in a forked child, which has a copy of it without a right to
    use it: what the child freed or sent would be counted twice."""

    def __init__(self) -> None:
        self.is_open = True
        _ends.add(self)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            _ends.discard(self)
            self.drop()

    def drop(self) -> None:
        """Let go of all that this process holds, telling nobody."""
        raise NotImplementedError

    def misused(self) -> PenstockError:
        return PenstockError("expected an open lane, but this end was closed, or copied by a fork; make a new one")


def place(name: LaneName) -> str:
    """The key under which the sender says where its memory is."""
    return f"lane {' '.join(map(str, name))}"


_ends: weakref.WeakSet[End] = weakref.WeakSet()


def _forked() -> None:
    for end in list(_ends):
        end.is_open = False
        end.drop()
    _ends.clear()


os.register_at_fork(after_in_child=_forked)
