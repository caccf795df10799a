"""Transports that a user registers by name, used where a Pipeline's `transport=` names one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from penstock.comm.transport.interface import LaneName, Receiver, Sender, Waiting
from penstock.core.arguments import named
from penstock.core.validation import text
from penstock.errors import InputError

BUILT_IN = ("shared", "gloo")


class Link(NamedTuple):
    """One lane of this rank, passed to the functions that make the ends of a registered transport."""

    lane: LaneName
    peer: int  # the rank at the other end
    store: Store  # a key-value store of all ranks, with a prefix for this lane
    watch: Waiting  # failure checks to call while an end waits


class Transport(NamedTuple):
    """The functions that make the two ends of a lane."""

    sender: Callable[[Link], Sender]
    receiver: Callable[[Link], Receiver]


_registered: dict[str, Transport] = {}


@named
def register_transport(name: str, sender: Callable[[Link], Sender], receiver: Callable[[Link], Receiver]) -> None:
    """Register a transport under a name, which `Pipeline(transport=...)` and PENSTOCK_TRANSPORT then take.

    `sender` and `receiver` make the ends of one lane from a Link; comm/transport/interface.py says what an end has to
    do. Every rank has to register it. A rank makes its senders before its receivers.
    """
    text("the name of a transport", name, "give a name of your own")
    if name in (*BUILT_IN, "nccl", "local"):
        raise InputError("a name of your own for the transport", repr(name), "choose another name")
    for what, make in (("sender", sender), ("receiver", receiver)):
        if not callable(make):
            raise InputError(f"{what} to be a function of a Link", type(make).__name__, "give a class or a function")
    _registered[name] = Transport(sender, receiver)


def transport_names() -> tuple[str, ...]:
    """Return the names that a user may choose from."""
    return (*BUILT_IN, *_registered)


def registered_transport(name: str) -> Transport | None:
    return _registered.get(name)
