"""Names of events and values that are the same in every process.

Ranks number what they meet in the order in which they meet it, and that order may be another one in each process: a
forward that iterates over a set of strings does so by their hashes. So what ranks exchange is called by what it is: an
event by its module or function and by what it is given, a value by the event that made it and its place in the result.
A name is a number of 63 bits, which fits on the wire.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum

import torch

from penstock.model import tree
from penstock.model.trace import Event, Value

_EXACT = (bool, float, complex, str, bytes, type(None), slice, range, type(Ellipsis))
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_ADDRESS = 1 << 31  # whole numbers beyond it may be addresses, which differ between processes


def name_of(*parts: object) -> int:
    """One number from several words and numbers."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def alike(event: str, given: object, name: Callable[[torch.Tensor], object]) -> int:
    """The name that all events share which are called and given the same; `name` says what a tensor is called."""
    return name_of(event, outline(given, name))


def settle_names(events: list[Event], values: list[Value], returned: dict[str, int]) -> None:
    """Give every event and value a name of its own.

    Those that were made alike are told apart by what becomes of them, found from the last event back to the first; what
    is `returned`, by its place in the result. Two that even become the same can stand for each other, and are counted.
    """
    uses: list[list[object]] = [[] for _ in values]
    for place, value in returned.items():
        if value >= 0:
            uses[value].append(("returned", place))
    ends = [0] * len(values)  # what becomes of each value

    def end_of(value: int) -> int:
        ends[value] = ends[value] or name_of(*sorted(map(repr, uses[value])))
        return ends[value]

    fates: list[int] = []
    for event in reversed(events):
        fate = name_of(event.alike, *map(end_of, event.makes), *(end_of(after) for _, after in event.changes))
        fates.append(fate)
        for value, place in zip(event.reads, event.places, strict=True):
            uses[value].append((fate, place))
    met: Counter[int] = Counter()
    for at, fate in enumerate(reversed(fates)):
        events[at] = replace(events[at], key=_counted(met, fate))
    for number, held in enumerate(values):
        held.key = _counted(met, name_of(held.key, end_of(number)))


def _counted(met: Counter[int], name: int) -> int:
    met[name] += 1
    return name_of(name, met[name]) if met[name] > 1 else name


def outline(value: object, name: Callable[[torch.Tensor], object]) -> str:
    """A value as text, the same in every process: its structure, its plain values, and the names of its tensors."""
    if isinstance(value, torch.Tensor):
        return f"<{name(value)}>"
    if isinstance(value, (*_EXACT, *_TORCH)):
        return repr(value)
    if isinstance(value, int):
        return repr(int(value)) if abs(int(value)) < _ADDRESS else "int"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, (set, frozenset)):
        return f"{{{','.join(sorted(outline(part, name) for part in value))}}}"
    if tree.is_container(value):
        parts = zip(place_names(value), tree.parts(value), strict=True)
        inner = [f"{place}:{outline(part, name)}" for place, part in parts]
        return f"{type(value).__name__}({','.join(sorted(inner) if isinstance(value, Mapping) else inner)})"
    return type(value).__qualname__


def places(value: object, at: str = "") -> list[str]:
    """Where each tensor of a value stands in it, in the order of `tree.tensors`."""
    if isinstance(value, torch.Tensor):
        return [at]
    if not tree.is_container(value):
        return []
    parts = zip(place_names(value), tree.parts(value), strict=True)
    return [found for place, part in parts for found in places(part, f"{at}/{place}")]


def leaf_places(value: object, at: str = "") -> list[str]:
    """Where each tensor and each plain value stands, in the order of `tree.leaves`."""
    if isinstance(value, torch.Tensor) or not tree.is_container(value):
        return [at]
    parts = zip(place_names(value), tree.parts(value), strict=True)
    return [found for place, part in parts for found in leaf_places(part, f"{at}/{place}")]


def place_names(container: object) -> list[str]:
    """The parts of a container by their keys; by their positions where keys are objects, of which nothing is sure."""
    return [
        str(key) if isinstance(key, (str, bytes, bool, float, Enum)) or _is_small(key) else f"#{at}"
        for at, key in enumerate(tree.keys(container))
    ]


def _is_small(key: object) -> bool:
    return isinstance(key, int) and abs(key) < _ADDRESS
