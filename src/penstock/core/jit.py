"""Loops over arrays that run as plain Python first and compiled after some thousand rows.

Loading compiled code takes a fifth of a second, too long for one small simulation; plain Python takes microseconds a
row, too long for ten million rows or a thousand small simulations. So a kernel is written once, as a plain loop over
arrays, and counts the rows of its calls: after some thousands it is compiled, or loaded from the cache of an earlier
process. Both ways give the same bits.
"""

from __future__ import annotations

import os
import stat
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

COMPILE_FROM = 8_000  # rows of all calls of a kernel so far: 10 ms of plain Python


class Kernel:
    """A loop over arrays: plain Python for its first rows over all calls, compiled for later ones."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function
        self._compiled: Callable[..., Any] | None = None
        self._rows = 0
        self.__doc__ = function.__doc__

    def __call__(self, size: int, *arguments: Any) -> Any:
        if self._compiled is not None:
            return self._compiled(*arguments)
        self._rows += size
        if self._rows < COMPILE_FROM:
            with np.errstate(all="ignore"):  # as compiled code, which gives no warnings
                return self.plain(*arguments)
        return self.compiled(*arguments)

    @property
    def compiled(self) -> Callable[..., Any]:
        if self._compiled is None:
            self._compiled = _compile(self.plain)
        return self._compiled


def kernel(function: Callable[..., Any]) -> Kernel:
    """Mark a loop over arrays as a kernel, which is called with the number of rows as first argument."""
    return Kernel(function)


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a plain function that kernels of the same file call, to compile it with them.

    It may take arrays, and named tuples of arrays, but must not allocate anything.
    """
    function.__penstock_helper__ = True  # type: ignore[attr-defined]
    return function


def _compile(function: Any, **more: Any) -> Callable[..., Any]:
    """Compile a function and the helpers it calls. The compiled code is cached on disk where that is possible."""
    import numba

    scope = dict(function.__globals__)
    for name in function.__code__.co_names:
        if getattr(scope.get(name), "__penstock_helper__", False):
            # Counting references to every array of a named tuple at each call would take most of a kernel's time; the
            # kernel holds them all while it runs. Numba's own inlining would count them too.
            scope[name] = _compile(scope[name], forceinline=True, _nrt=False)
    linked = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    linked.__module__, linked.__qualname__ = function.__module__, function.__qualname__
    # Kernels never divide by zero; numpy's error model omits the check.
    options: dict[str, Any] = {"error_model": "numpy", **more}
    compiled: Callable[..., Any]
    try:
        compiled = numba.njit(cache=True, **options)(linked)  # beside the source, else in the user's cache directory
    except RuntimeError:  # neither is writable
        with _own_cache() as is_cached:
            compiled = numba.njit(cache=is_cached, **options)(linked)
    return compiled


@contextmanager
def _own_cache() -> Iterator[bool]:
    """Let numba cache compiled code in a temporary directory of this user; yield False where there is none."""
    import numba

    config: Any = numba.config
    before, directory = config.CACHE_DIR, _private_directory()
    config.CACHE_DIR = "" if directory is None else str(directory)
    try:
        yield directory is not None
    finally:
        config.CACHE_DIR = before


def _private_directory() -> Path | None:
    """Return a directory that only this user can write, or None: cached code is executed, so no other is trusted."""
    directory = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return directory if private and os.access(directory, os.W_OK) else None
