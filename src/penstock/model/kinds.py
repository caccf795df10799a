"""The kind of a model's inputs: inputs of one kind and size take the same path, unless data decides."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import torch

from penstock.model import tree

ANY = "a float or an object"  # has no size, but open code may branch on it: such paths are walked each time


class Outlook(NamedTuple):
    """The state of a model that decides its path: modes, flags, and numbers, which rarely do."""

    modes: tuple[bool, ...]
    flags: tuple[Any, ...]
    numbers: tuple[Any, ...]


class Kind(NamedTuple):
    """The part of inputs and model that decides the path before anything runs, and numbers, which may."""

    marks: Any  # modes, flags, and the structure of the inputs
    sizes: tuple[Any, ...]  # shapes and numbers in the inputs
    numbers: tuple[Any, ...]  # attributes of open modules


def kind_of_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], outlook: Outlook) -> Kind:
    """Return the kind of some inputs, for a model with this outlook."""
    sizes: list[Any] = []
    marks = (outlook.modes, outlook.flags, _mark((args, kwargs), sizes))
    return Kind(marks, tuple(sizes), outlook.numbers)


def _mark(value: Any, sizes: list[Any]) -> Any:
    """Return the kind of a value: containers, names, types. Shapes and numbers are added to `sizes`."""
    if isinstance(value, torch.Tensor):
        sizes.append(tuple(value.shape))
        return (value.dtype, value.dim(), value.requires_grad)
    if isinstance(value, (list, tuple)) and value and all(isinstance(part, str) for part in value):
        sizes += (len(value), ANY)  # probably one for each row: other strings do not change the path
        return (type(value), str)
    if tree.is_container(value):
        return (type(value), tuple(tree.keys(value)), tuple(_mark(part, sizes) for part in tree.parts(value)))
    if isinstance(value, (bool, str, bytes, type(None), torch.dtype, torch.device, Enum)):
        return (type(value), value)
    sizes.append(value if type(value) is int else ANY)
    return type(value)
