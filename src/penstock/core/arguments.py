"""Arguments of public calls: their texts, checks, and errors that name a wrong one and the closest valid one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, get_args, get_type_hints

from penstock.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")
Noun = TypeVar("Noun")
Holder = TypeVar("Holder")

MOST_LISTED = 12  # argument names in a message
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def named(function: Callable[P, R]) -> Callable[P, R]:
    """Raise ArgumentError for a call whose arguments do not fit the function's signature; other calls are unchanged."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is None:  # the body has not started
                refuse_call(function, args, kwargs)
            raise

    return called


def named_fields(noun: type[Noun]) -> type[Noun]:
    """Apply `named` to the constructor of a class."""
    noun.__init__ = named(noun.__init__)  # type: ignore[method-assign]
    return noun


def refuse_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ArgumentError for a call that does not fit the function's signature; return if it fits."""
    signature, names, name = inspect.signature(function), parameters_of(function), _name(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        missing = str(error).partition("missing a required")[2].rpartition(": ")[2].strip("'")
        takes_options = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
        if not takes_options or get_close_matches(missing, kwargs.keys() - set(names)):
            refuse_unknown(name, kwargs, names)
        if missing:
            raise ArgumentError(f"{missing}= for {name}", "none", f"give {missing}") from None
        raise ArgumentError(f"arguments that {name} takes", error, "give them by name") from None


def refuse_unknown(name: str, arguments: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise ArgumentError for arguments that a function does not take."""
    names = list(allowed)
    unknown = [argument for argument in arguments if argument not in names]
    if not unknown:
        return
    near = [match for argument in unknown for match in get_close_matches(argument, names, n=1)]
    short = len(names) <= MOST_LISTED
    advice = f"it takes {', '.join(names)}" if short else f"leave it out (help(penstock.{name}) lists its arguments)"
    advice = f"did you mean {' and '.join(dict.fromkeys(near))}?" if near else advice
    raise ArgumentError(f"arguments that {name} takes", ", ".join(map(repr, unknown)), advice) from None


@cache
def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters, except *args and **kwargs."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind in _NAMED and p.name != "self")


def _name(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")


@dataclass(frozen=True)
class Option:
    """One option of a call, as `typing.Annotated` data of a dataclass field: its text in `help()`, a check that raises
    InputError for a wrong value, and whether all ranks must give the same."""

    text: str
    check: Callable[[Any], object] | None = None
    same: bool = False


def options_of(fields: Any) -> dict[str, Option]:
    """Return the options of a dataclass by name, in order; a field without an Option has an empty text."""
    hints = get_type_hints(fields, include_extras=True)
    options = {}
    for name in inspect.signature(fields).parameters:
        declared = [part for part in get_args(hints[name]) if isinstance(part, Option)]
        options[name] = declared[0] if declared else Option("")
    return options


def check_options(options: Any) -> None:
    """Run the check of every option of a dataclass object on its value."""
    for name, option in options_of(type(options)).items():
        if option.check is not None:
            option.check(getattr(options, name))


def takes(
    fields: Callable[P, Noun], others: Callable[[], Iterable[str]]
) -> Callable[[Callable[[Holder, Noun, dict[str, Any]], None]], Callable[Concatenate[Holder, P], None]]:
    """Give a constructor the arguments of a dataclass: type checkers, `help()` and error messages see each of them.

    The constructor gets the dataclass object, and a dict of the arguments that only `others()` names.
    """

    def decorate(function: Callable[[Holder, Noun, dict[str, Any]], None]) -> Callable[Concatenate[Holder, P], None]:
        parameters = inspect.signature(fields).parameters
        plain = get_type_hints(fields)

        @wraps(function)
        def called(self: Holder, *args: P.args, **kwargs: P.kwargs) -> None:
            given: dict[str, Any] = dict(kwargs)
            beside = {name: given.pop(name) for name in others() if name in given and name not in parameters}
            refuse_call(called, (self, *args), given)
            function(self, fields(*args, **given), beside)

        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        readable = [parameter.replace(annotation=_shortened(plain[name])) for name, parameter in parameters.items()]
        called.__signature__ = inspect.Signature([first, *readable])  # type: ignore[attr-defined]
        return cast(Callable[Concatenate[Holder, P], None], called)

    return decorate


def _shortened(annotation: Any) -> str:
    """Return a type as `help()` shows it, without the modules of its names."""
    return re.sub(r"(?:\w+\.)+(?=\w)", "", inspect.formatannotation(annotation))
