"""Attributes of open modules that a user may set between steps and open code may branch on: flags and numbers.

`model.aux = True` changes the path of a model whose code tests `if self.aux`. The attributes are read for every
micro-batch, so only those of open modules, and of plain objects that they hold, such as a config, are considered.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_FLAGS = frozenset((bool, str, type(None), torch.dtype, torch.device))
_NUMBERS = frozenset((int, float))
_passed: set[type] = set()  # other types, cached as every attribute is checked before every step
_NO_CONFIG = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.Generator)


def flags_of(modules: Iterable[nn.Module]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return flags and strings, which decide a path, and numbers, which rarely do."""
    flags: list[Any] = []
    numbers: list[Any] = []
    held: dict[int, Any] = {}
    for module in modules:
        _look(vars(module), flags, numbers, held)
    for thing in held.values():
        _look(vars(thing), flags, numbers, {})
    return tuple(flags), tuple(numbers)


def _look(attributes: dict[str, Any], flags: list[Any], numbers: list[Any], held: dict[int, Any]) -> None:
    for name, value in attributes.items():
        kind = type(value)
        if kind in _FLAGS:
            flags.append((name, value))
        elif kind in _NUMBERS:
            numbers.append(value)
        elif kind is dict or kind is list or kind is tuple or kind in _passed:
            continue
        elif isinstance(value, Enum):
            flags.append((name, value))
        elif isinstance(value, _NO_CONFIG) or not hasattr(value, "__dict__"):
            _passed.add(kind)
        else:
            held[id(value)] = value
