"""Files in memory that the other processes of this host can open, and that nothing is left of afterwards.

Linux has files without a name, which are reached through the process that has them open. Elsewhere a file in the
directory for temporary files stands in for one; whoever made it takes its name away once all have opened it.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Nameless:
    """`fd`: this process's own; `path`: by which another process of the same user opens it."""

    fd: int
    path: str
    temporary: bool

    def take_name(self) -> None:
        """From now on only those have it that have opened it."""
        if self.temporary:
            with suppress(OSError):
                Path(self.path).unlink()


def create(name: str, size: int) -> Nameless:
    """A new file of zeros."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        made = Nameless(fd, f"/proc/{os.getpid()}/fd/{fd}", temporary=False)
    else:
        fd, path = tempfile.mkstemp(prefix=f"{name}-")
        made = Nameless(fd, path, temporary=True)
    os.ftruncate(fd, size)
    return made
