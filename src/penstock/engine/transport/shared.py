"""A lane through memory that two processes of one host share.

The sender copies every tensor once, into a slot; the receiver's tensors are that slot. When the last of them is
garbage, whoever held it, the slot goes back to the sender. Nothing has a name in the file system: the receiver opens
the sender's memory through /proc, which the kernel allows to processes of the same user, and when both have ended,
however they ended, the memory is free.
"""

from __future__ import annotations

from penstock.engine.transport.shared_end import Elsewhere, Store
from penstock.engine.transport.shared_receiver import SharedReceiver
from penstock.engine.transport.shared_sender import SharedSender

__all__ = ["Elsewhere", "SharedReceiver", "SharedSender", "Store"]
