"""Every small damage to a JSON value: each place in it, taken away or replaced by something else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

Path = tuple[str | int, ...]

FEW = 3  # of the entries of a long list or table are enough: they are alike
OTHERS: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 70, 1.5, float("nan"), 1e308, "", "x", "float32", [], {}, [[]], {"a": 1},
    {"kind": "tensor", "type": "float32", "shape": [-1], "of": "AAAA"},
    {"kind": "dict", "of": [[[], 1]]},
)  # fmt: skip


def damages(value: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is done, and what makes the damaged copy."""
    for path in _places(value, ()):
        if path:
            yield f"{_shown(path)} taken away", partial(_without, value, path)
        here = _at(value, path)
        others: list[tuple[str, Any]] = [(f"is {str(other)[:60]}", other) for other in OTHERS]
        others += [("in a list", [here]), ("in a table", {"a": here}), ("twice in a list", [here, here])]
        if isinstance(here, list) and here:
            others += [("reversed", here[::-1]), ("and its last again", [*here, here[-1]])]
        if isinstance(here, dict) and here:
            others.append(("and one more", {**here, "one more": next(iter(here.values()))}))
        for what, other in others:
            if not _same(other, here):
                yield f"{_shown(path)} {what}", partial(_with, value, path, other)


def _places(value: Any, path: Path) -> Iterator[Path]:
    yield path
    if isinstance(value, (dict, list)):
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys if len(keys) <= 4 * FEW else [*keys[:FEW], *keys[-FEW:]]:
            yield from _places(value[key], (*path, key))


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(value: Any, path: Path, other: Any) -> Any:
    if not path:
        return copy.deepcopy(other)
    whole = copy.deepcopy(value)
    _at(whole, path[:-1])[path[-1]] = copy.deepcopy(other)
    return whole


def _without(value: Any, path: Path) -> Any:
    whole = copy.deepcopy(value)
    del _at(whole, path[:-1])[path[-1]]
    return whole


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def _shown(path: Path) -> str:
    return "/".join(map(str, path)) or "everything"
