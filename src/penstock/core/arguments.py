"""Calls with wrong arguments: one message that names the wrong one and the nearest right one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from penstock.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")
Noun = TypeVar("Noun")

FEW = 12  # names, as many as a message may list
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def named(function: Callable[P, R]) -> Callable[P, R]:
    """Answer a call that the function cannot take; one that it takes runs as ever, whatever it raises itself."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is None:  # not a line of it has run
                refuse_call(function, args, kwargs)
            raise

    return called


def named_fields(noun: type[Noun]) -> type[Noun]:
    """The same for what makes an object of a class."""
    noun.__init__ = named(noun.__init__)  # type: ignore[method-assign]
    return noun


def refuse_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Say what is wrong with a call; nothing where it fits."""
    signature, known, name = inspect.signature(function), parameters_of(function), _name(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        missing = str(error).partition("missing a required")[2].rpartition(": ")[2].strip("'")
        more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
        if not more or get_close_matches(missing, kwargs.keys() - set(known)):
            refuse_unknown(name, kwargs, known)
        if missing:
            raise ArgumentError(f"{missing}= for {name}", "none", f"give {missing}") from None
        raise ArgumentError(f"arguments that {name} takes", error, "give them by name") from None


def refuse_unknown(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse arguments that a function does not take."""
    every = list(known)
    unknown = [argument for argument in given if argument not in every]
    if not unknown:
        return
    near = [match for argument in unknown for match in get_close_matches(argument, every, n=1)]
    few = len(every) <= FEW
    advice = f"it takes {', '.join(every)}" if few else f"leave it out (help(penstock.{name}) lists what there is)"
    advice = f"did you mean {' and '.join(dict.fromkeys(near))}?" if near else advice
    raise ArgumentError(f"arguments that {name} takes", ", ".join(map(repr, unknown)), advice)


@cache
def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names that a function takes arguments by, those of its options left out."""
    every = inspect.signature(function).parameters.values()
    return tuple(p.name for p in every if p.kind in _NAMED and p.name != "self")


def _name(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")
