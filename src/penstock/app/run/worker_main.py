"""The first module that a worker runs: `python -m penstock.app.run.worker_main MODULE ARGUMENTS...` runs the module.

Torch takes seconds to load. Ctrl-C during that time prints no traceback on any rank; after the start, the ranks report
their own end.
"""

from __future__ import annotations

import runpy
import signal
import sys

from penstock.interrupt import exit_on_interrupt_during_imports


def command(module: str, arguments: list[str]) -> list[str]:
    """Return the command that starts a worker with a module."""
    return [sys.executable, "-m", "penstock.app.run.worker_main", module, *arguments]


def main() -> None:
    """Run the module that the arguments name."""
    del sys.argv[0]
    try:
        with exit_on_interrupt_during_imports():
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        if sys.excepthook is not sys.__excepthook__:
            raise
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
