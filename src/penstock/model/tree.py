"""Tensors inside arguments and results of models: in tuples, lists, dicts, named tuples, dataclasses, and their
subclasses.

A container is rebuilt only when something in it changes, and as its own type. Anything else is passed through
unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

_LEAVES = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.Tensor}  # types without parts


def tensors(value: Any) -> list[torch.Tensor]:
    """Return every tensor in a value, in a fixed order."""
    found: list[torch.Tensor] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[torch.Tensor]) -> None:
    """Collect tensors. This runs for every torch function that open code calls, so usual types are checked first."""
    for part in value if type(value) is tuple else (value,):
        kind = type(part)
        if kind is torch.Tensor:
            found.append(part)
        elif kind in _LEAVES:
            continue
        elif kind is tuple:
            _gather(part, found)
        elif kind is dict:
            for inner in part.values():
                _gather(inner, found)
        elif isinstance(part, torch.Tensor):
            found.append(part)
        else:
            for inner in parts(part):
                _gather(inner, found)


def leaves(value: Any) -> list[Any]:
    """Return every tensor and every plain value, in a fixed order."""
    found: list[Any] = []
    replace_leaves(value, found.append)
    return found


def replace(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return the value with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    inner = () if type(value) in _LEAVES else parts(value)
    if not inner:
        return value
    return _with(value, inner, [replace(part, change) for part in inner])


def replace_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the value with every tensor and every plain value changed."""
    if isinstance(value, torch.Tensor) or not is_container(value):
        return change(value)
    inner = parts(value)
    return _with(value, inner, [replace_leaves(part, change) for part in inner])


def fresh(value: Any) -> Any:
    """Return the value with its containers copied, so that changes do not affect the original."""
    if type(value) is tuple and _LEAVES.issuperset(map(type, value)):  # the usual case
        return value
    if isinstance(value, torch.Tensor) or not is_container(value) or isinstance(value, MappingProxyType):
        return value
    inner = parts(value)
    made = _with(value, inner, [fresh(part) for part in inner])
    return made if made is not value or isinstance(value, tuple) else copy.copy(value)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the value with every direct part changed, if it has parts."""
    inner = parts(value)
    return _with(value, inner, [change(part) for part in inner]) if inner else value


def is_container(value: Any) -> bool:
    return isinstance(value, (tuple, list, Mapping)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def keys(value: Any) -> list[Any]:
    """Return the keys of a container's parts."""
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, (tuple, list)):
        return list(range(len(value)))
    return [field.name for field in dataclasses.fields(value)]


def parts(value: Any) -> Sequence[Any]:
    """Return the parts of a container; none for other values."""
    kind = type(value)
    if kind is tuple or kind is list:
        return value  # type: ignore[no-any-return]
    if kind in _LEAVES:
        return ()
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if not isinstance(value, torch.Tensor):
        _LEAVES.add(kind)
    return ()


def _with(value: Any, before: Sequence[Any], after: list[Any]) -> Any:
    if all(old is new for old, new in zip(before, after, strict=True)):
        return value
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            return tuple.__new__(type(value), after)  # a named tuple's own checks may reject stand-ins
        return type(value)(after)
    if isinstance(value, list):
        return type(value)(after)
    if isinstance(value, MappingProxyType):
        return MappingProxyType(dict(zip(keys(value), after, strict=True)))
    fresh = copy.copy(value)
    for key, part in zip(keys(value), after, strict=True):
        if isinstance(value, Mapping):
            fresh[key] = part
        else:
            object.__setattr__(fresh, key, part)  # a frozen dataclass too
    return fresh
