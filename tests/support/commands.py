"""Commands of the command line: in this process, in one that is forked, or started as a person starts them.

All say the same: `tests/cli/test_cli.py` and `tests/cli/test_cli_train.py` show it for some.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple
from unittest import mock

import nursery
from penstock import cli

MODULE = [sys.executable, "-m", "penstock.cli"]
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Done(NamedTuple):
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def penstock(*arguments: object) -> Done:
    """A command in this process, which has loaded everything."""
    words = ["penstock", *map(str, arguments)]
    with _file() as out, _file() as err:
        with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _code()
        return Done(code, *(_said(file) for file in (out, err)))


def environment() -> dict[str, str]:
    """That of no rank."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHED} | {"OMP_NUM_THREADS": "1"}


def forked(*arguments: object, ranks: int = 0, cwd: Path | None = None) -> Done:
    """A command in a process, and as many workers as it launches, that have torch loaded (see nursery)."""
    return python("-m", "penstock.cli", *arguments, ranks=ranks, cwd=cwd)


def python(*arguments: object, ranks: int = 0, cwd: Path | None = None, seconds: float = 240) -> Done:
    """The same for a script, or for `-m` and a module."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        words, env = [*map(str, arguments)], environment() | {"PYTHONPATH": nursery.PYTHONPATH}
        started = nursery.start(words, env, out.fileno(), err.fileno(), ranks=ranks, cwd=cwd)
        try:
            code = started.wait(seconds)
        finally:
            started.kill()
        return Done(code, *(_said(file) for file in (out, err)))


def process(*arguments: object, seconds: float = 240) -> Done:
    """A command as a person starts it."""
    words = [*MODULE, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, env=environment())
    return Done(done.returncode, done.stdout, done.stderr)


def refused(*arguments: object) -> str:
    """The one message of a refusal: code 2, nothing on standard output, no traceback."""
    done = penstock(*arguments)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


def _file() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8")


def _code() -> int:
    try:
        cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _said(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
