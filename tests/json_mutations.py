"""Every small damage to a JSON value: each place in it, taken away or replaced by something else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]

FEW = 3  # of the entries of a long list or table are enough: they are alike
OTHERS: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 70, 1.5, float("nan"), 1e308, "", "x", "float32", [], {}, [[]], {"a": 1},
    {"kind": "tensor", "type": "float32", "shape": [-1], "of": "AAAA"},
    {"kind": "dict", "of": [[[], 1]]},
)  # fmt: skip


def damages(value: Any) -> Iterator[tuple[str, Any]]:
    """What was done, and the damaged copy."""
    for path in _places(value, ()):
        if path:
            yield f"{_shown(path)} taken away", _without(value, path)
        here = _at(value, path)
        for other in (*OTHERS, [here], {"a": here}, [here, here]):
            if not _same(other, here):
                yield f"{_shown(path)} is {str(other)[:60]}", _with(value, path, other)
        if isinstance(here, list) and here:
            yield f"{_shown(path)} reversed", _with(value, path, here[::-1])
            yield f"{_shown(path)} and its last again", _with(value, path, [*here, here[-1]])
        if isinstance(here, dict) and here:
            yield f"{_shown(path)} and one more", _with(value, path, {**here, "one more": next(iter(here.values()))})


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
