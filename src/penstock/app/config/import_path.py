"""Import the functions that a config names as `package.module:function`, or raise an error that says which part is
missing."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.errors import FormatError

SHAPE = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


def import_function(where: str, text: str) -> Callable[..., Any]:
    """Import the function of that name. `where` is the config's key."""
    place, name = text.split(":")
    module = _module(where, place)
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    near = get_close_matches(name, vars(module), n=1)
    advice = f"did you mean {place}:{near[0]}?" if near else f"define {name} there"
    raise FormatError(where, f"a function in {place}", f"no {name!r}", advice)


def add_import_folders(folder: Path) -> None:
    """Make modules of the working directory and of this folder, such as the config's, importable."""
    for place in (str(folder.resolve()), str(Path.cwd())):
        if place not in sys.path:
            sys.path.append(place)


def call_function(section: str, make: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function. Arguments that it does not take are reported as a fault of the config."""
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        name = getattr(make, "__name__", "the function")
        raise FormatError(f"{section}.arguments", f"what {name} takes", error, "correct them") from None
    except ValueError:
        pass  # a function without a signature
    return make(**arguments)


def _module(where: str, place: str) -> Any:
    try:
        return import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(f"{error.name}.")):
            raise  # the module exists, but imports a missing one
        advice = "check the name; modules beside the config and in the working directory are found"
        raise FormatError(where, "a module that can be imported", repr(place), advice) from None
