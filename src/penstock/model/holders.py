"""Objects that hold a module's state and can be restored: dicts, lists, sets, deques, plain objects, arrays,
generators.

Each kind of holder can return its content (`look`), in a form that does not change with the holder, and restore such a
content (`put`).
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

COMPILED = "_compiled_call_impl"  # the attribute of a module that torch calls in place of its own code
OWN = frozenset(vars(nn.Module()))  # torch's own attributes of every module
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, *_CODE)
)  # types without parts
_NO_RECORD = (nn.Module, torch.Tensor, *_CODE)


class Access(NamedTuple):
    """The functions that read and write one kind of holder. Its content is a list of values and their keys."""

    look: Callable[[Any], tuple[Any, list[Any]]]
    put: Callable[[Any, Any, list[Any]], None]


def _look_dict(held: dict[Any, Any]) -> tuple[Any, list[Any]]:
    return list(held), list(held.values())


def _put_dict(held: dict[Any, Any], keys: Any, values: list[Any]) -> None:
    held.clear()
    held.update(zip(keys, values, strict=True))


def look_module(held: nn.Module) -> tuple[Any, list[Any]]:
    """All but its compiled call, which is no state: a walk keeps its entry there."""
    names, values = _look_dict(vars(held))
    if COMPILED in names:
        del values[names.index(COMPILED)]
        names.remove(COMPILED)
    return names, values


def _put_module(held: nn.Module, names: Any, values: list[Any]) -> None:
    attributes = vars(held)
    compiled = {COMPILED: attributes[COMPILED]} if COMPILED in attributes else {}
    _put_dict(attributes, names, values)
    attributes.update(compiled)


def _look_values(held: Any) -> tuple[Any, list[Any]]:
    return None, list(held)


def _put_list(held: list[Any], _: Any, values: list[Any]) -> None:
    held[:] = values


def _put_set(held: set[Any] | deque[Any], _: Any, values: list[Any]) -> None:
    held.clear()
    if isinstance(held, deque):
        held.extend(values)
    else:
        held.update(values)


DICT, _LIST, _SET = (
    Access(_look_dict, _put_dict),
    Access(_look_values, _put_list),
    Access(_look_values, _put_set),
)
_OBJECT = Access(lambda held: _look_dict(vars(held)), lambda held, *rest: _put_dict(vars(held), *rest))
MODULE = Access(look_module, _put_module)
_ARRAY = Access(lambda held: (held.copy(), []), lambda held, before, _: np.copyto(held, before))
_PYTHON = Access(lambda held: (held.getstate(), []), lambda held, state, _: held.setstate(state))
_NUMPY = Access(lambda held: (held.bit_generator.state, []), lambda held, s, _: setattr(held.bit_generator, "state", s))
_OLD_NUMPY = Access(lambda held: (held.get_state(), []), lambda held, state, _: held.set_state(state))
_TORCH = Access(lambda held: (held.get_state(), []), lambda held, state, _: held.set_state(state))
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


_kinds: dict[type, Access | None] = {}  # cached by type, as it is needed for every attribute before every step


def kind_of(value: Any) -> Access | None:
    """Return how to read and write a value, or None where it holds nothing that a forward could change."""
    try:
        kind = _kinds[type(value)]
    except KeyError:
        kind = _kinds[type(value)] = _kind_of(value)
    return None if kind is _ARRAY and not value.flags.writeable else kind


def _kind_of(value: Any) -> Access | None:
    if isinstance(value, nn.Module):
        return MODULE
    if isinstance(value, (dict, list, set, deque)):
        return DICT if isinstance(value, dict) else _LIST if isinstance(value, list) else _SET
    if isinstance(value, np.ndarray):
        return _ARRAY
    if isinstance(value, GENERATORS):
        kinds = (_PYTHON, _NUMPY, _OLD_NUMPY, _TORCH)
        return next(kind for kind, cls in zip(kinds, GENERATORS, strict=True) if isinstance(value, cls))
    return _OBJECT if is_record(value) else None


_records: dict[type, bool] = {}


def is_record(value: Any) -> bool:
    """Whether a value is a user's object with attributes, such as a config. Objects of libraries may hold threads and
    files."""
    known = _records.get(type(value))
    if known is None:
        known = _records[type(value)] = _is_record(value)
    return known


def _is_record(value: Any) -> bool:
    if isinstance(value, _NO_RECORD) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.split(".")[0] not in _LIBRARIES


_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy"))


def same(now: tuple[Any, list[Any]], before: tuple[Any, list[Any]]) -> bool:
    """Whether two contents are the same: values by identity, keys and states of generators by value."""
    if len(now[1]) != len(before[1]) or not all(map(is_, now[1], before[1])):
        return False
    return equal(now[0], before[0])


def equal(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return torch.equal(now, before)
    if isinstance(now, np.ndarray):
        return now.dtype == before.dtype and np.array_equal(now, before, equal_nan=now.dtype.kind in "fc")
    if isinstance(now, dict) and isinstance(before, dict):
        return now.keys() == before.keys() and all(equal(now[key], before[key]) for key in now)
    if isinstance(now, (tuple, list)) and len(now) < 64:
        return len(now) == len(before) and all(map(equal, now, before))
    return bool(now == before)
