"""The common part of both ends of a lane through memory that two processes of one host share.

The sender copies every tensor once, into a slot; the receiver's tensors are views of that slot. When the last of them
is deleted, the slot returns to the sender. No memory has a name in the file system: the receiver opens the sender's
memory through /proc, which the kernel allows to processes of the same user. The memory is freed when both processes
have ended, however they ended. A forked child must not use the lane.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from penstock.comm.transport.interface import LaneName
from penstock.errors import PenstockError


class Store(Protocol):
    """The methods of `torch.distributed.Store` that lanes use."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class SentElsewhere(Exception):
    """The message was sent over another lane, as there was no shared memory for it. Not an error."""


class LaneEnd:
    """An end of a lane, open until it is closed. Its copy in a forked child is closed: what the child frees or sends
    would be counted twice."""

    def __init__(self) -> None:
        self.is_open = True
        _ends.add(self)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            _ends.discard(self)
            self.drop()

    def drop(self) -> None:
        """Release all resources of this process, without notice to the other end."""
        raise NotImplementedError

    def misused(self) -> PenstockError:
        return PenstockError("expected an open lane, but this end was closed, or copied by a fork; make a new one")


def place(name: LaneName) -> str:
    """The key under which the sender says where its memory is."""
    return f"lane {' '.join(map(str, name))}"


_ends: weakref.WeakSet[LaneEnd] = weakref.WeakSet()


def _forked() -> None:
    for end in list(_ends):
        end.is_open = False
        end.drop()
    _ends.clear()


os.register_at_fork(after_in_child=_forked)
