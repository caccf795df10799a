"""What a worker of a command runs first: `python -m penstock.app.run.worker_main MODULE WORDS...` runs the module.

Torch takes seconds to load. Ctrl-C in that time needs no traceback from every rank; once the ranks have met, what each
says of its end is theirs to decide.
"""

from __future__ import annotations

import runpy
import signal
import sys

from penstock.interrupt import exit_on_interrupt_during_imports


def command(module: str, words: list[str]) -> list[str]:
    """What starts a worker that runs a module's share of some work."""
    return [sys.executable, "-m", "penstock.app.run.worker_main", module, *words]


def main() -> None:
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
