"""Loops that run as plain Python when small and compiled when large.

A compiler needs seconds to warm up, which a small simulation must not pay, and plain Python needs microseconds an
action, which ten million actions must not pay. So a kernel is written once, as a plain loop over arrays, and the size
of the work decides how it runs. Both ways give the same bits.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

COMPILE_FROM = 30_000  # rows at which compiling (or loading the compiled code from disk) starts to pay


class _Calls:
    many = False


_calls = _Calls()


def expect_many_calls() -> None:
    """Small calls are coming by the hundred: from now on every kernel is compiled when it is first called."""
    _calls.many = True


class Kernel:
    """A loop over arrays that compiles itself on its first large call, and is then there for small ones too."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function
        self._compiled: Callable[..., Any] | None = None
        self.__doc__ = function.__doc__

    def __call__(self, size: int, *arguments: Any) -> Any:
        plain = size < COMPILE_FROM and self._compiled is None and not _calls.many
        return (self.plain if plain else self.compiled)(*arguments)

    @property
    def compiled(self) -> Callable[..., Any]:
        if self._compiled is None:
            self._compiled = _compile(self.plain)
        return self._compiled


def kernel(function: Callable[..., Any]) -> Kernel:
    """Mark a loop over arrays as a kernel: call it with the number of rows first."""
    return Kernel(function)


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a plain function that kernels of the same file call; it is compiled along with them."""
    function.__penstock_helper__ = True  # type: ignore[attr-defined]
    return function


def _compile(function: Any, inline: str = "never") -> Callable[..., Any]:
    """Compile a function and the helpers it calls. The compiled code is kept on disk where that is possible."""
    import numba

    scope = dict(function.__globals__)
    for name in function.__code__.co_names:
        if getattr(scope.get(name), "__penstock_helper__", False):
            scope[name] = _compile(scope[name], inline="always")  # a call would count references to every array
    linked = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    linked.__module__, linked.__qualname__ = function.__module__, function.__qualname__
    # Kernels never divide by zero: numpy's error model does not look for it.
    options: dict[str, Any] = {"inline": inline, "error_model": "numpy"}
    compiled: Callable[..., Any]
    try:
        compiled = numba.njit(cache=True, **options)(linked)
    except RuntimeError:  # nowhere to keep it: compile again in every process
        compiled = numba.njit(**options)(linked)
    return compiled
