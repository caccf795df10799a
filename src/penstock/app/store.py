"""The store of a launched run, in a process of its own.

Torch has it, and takes seconds to load, in which a process hears no signal. The launcher has to hear them at any time.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# argv: address, port, and the descriptor of the socket that listens there. It ends when the launcher closes its input.
HOLD = """
import os, sys
from torch._C._distributed_c10d import TCPStore
address, port, fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
os.read(0, 1)
os._exit(0)
"""


@contextmanager
def holding_store(listener: socket.socket) -> Iterator[None]:
    """The store at a socket that listens. Ranks start meanwhile: what they ask waits there until torch is loaded."""
    address, port = listener.getsockname()[:2]
    words = [sys.executable, "-c", HOLD, address, str(port), str(listener.fileno())]
    fds = (listener.fileno(),)
    # A process group of its own: Ctrl-C is the launcher's to hear.
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=fds, process_group=0)
    listener.close()
    try:
        yield
    finally:
        holder.kill()
        holder.communicate()
