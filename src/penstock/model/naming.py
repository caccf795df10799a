"""Names of events and values that are equal in every process.

Ranks number events in the order in which they occur, which may differ between processes: a forward that iterates over a
set of strings depends on their hashes. So ranks identify an event by its module or function and its arguments, and a
value by its event and its place in the result. A name is a number of 63 bits, which fits into a message.
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
_ADDRESS = 1 << 31  # larger integers may be addresses, which differ between processes


def name_of(*parts: object) -> int:
    """Return one number from several strings and numbers."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def alike(event: str, given: object, name: Callable[[torch.Tensor], object]) -> int:
    """Return the name shared by all events with the same call and arguments; `name` returns the name of a tensor."""
    return name_of(event, outline(given, name))


def settle_names(events: list[Event], values: list[Value], returned: dict[str, int]) -> None:
    """Give every event and value a unique name.

    Equal ones are distinguished by how their results are used, from the last event back to the first; `returned` is the
    model's result by place. Those whose results are used equally are interchangeable, and are counted.
    """
    uses: list[list[object]] = [[] for _ in values]
    for place, value in returned.items():
        if value >= 0:
            uses[value].append(("returned", place))
    ends = [0] * len(values)  # hash of the uses of each value

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
    """Return a value as text that is equal in every process: its structure, its plain values, and the names of its
    tensors."""
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
    """Return the path of each tensor within a value, in the order of `tree.tensors`."""
    if isinstance(value, torch.Tensor):
        return [at]
    if not tree.is_container(value):
        return []
    parts = zip(place_names(value), tree.parts(value), strict=True)
    return [found for place, part in parts for found in places(part, f"{at}/{place}")]


def leaf_places(value: object, at: str = "") -> list[str]:
    """Return the path of each tensor and each plain value, in the order of `tree.leaves`."""
    if isinstance(value, torch.Tensor) or not tree.is_container(value):
        return [at]
    parts = zip(place_names(value), tree.parts(value), strict=True)
    return [found for place, part in parts for found in leaf_places(part, f"{at}/{place}")]


def place_names(container: object) -> list[str]:
    """Return the keys of a container's parts; their positions where keys are objects, which may differ between
    processes."""
    return [
        str(key) if isinstance(key, (str, bytes, bool, float, Enum)) or _is_small(key) else f"#{at}"
        for at, key in enumerate(tree.keys(container))
    ]


def _is_small(key: object) -> bool:
    return isinstance(key, int) and abs(key) < _ADDRESS
