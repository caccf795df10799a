"""Values that a call adds to containers among its arguments, such as a layer that sets a key in a dict shared by all
layers.

They count as part of its result: a stage that skips the call adds them too, as stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

from penstock.model import tree

Place = tuple[Any, ...]  # the keys from the arguments to a container


class Addition(NamedTuple):
    """An addition to a container: the value of a key is set, or a value is appended where the key is None."""

    container: Place
    key: Any


class Containers:
    """The dicts and lists in the arguments of a call, with their contents before it."""

    def __init__(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.given = given
        self.before = [(place, held, tree_items(held)) for place, held in _mutable(given, ())]

    def additions(self) -> list[tuple[Addition, Any]]:
        """Return the additions made since, with their values."""
        found: list[tuple[Addition, Any]] = []
        for place, held, before in self.before:
            if isinstance(held, list):
                found += [(Addition(place, at), held[at]) for at in range(len(before)) if at < len(held)
                          and held[at] is not before[at]]  # fmt: skip
                found += [(Addition(place, None), value) for value in held[len(before) :]]
            else:
                old = dict(before)
                found += [(Addition(place, k), v) for k, v in held.items() if k not in old or old[k] is not v]
        return found


def tree_items(held: Any) -> list[Any]:
    return list(held) if isinstance(held, list) else list(held.items())


def _mutable(value: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    if not tree.is_container(value):
        return
    if type(value) is list or isinstance(value, MutableMapping):
        yield place, value
    for key, part in zip(tree.keys(value), tree.parts(value), strict=True):
        yield from _mutable(part, (*place, key))


def added(given: Any, additions: tuple[Addition, ...], lengths: dict[Place, int]) -> list[Any]:
    """Return the values that a call has added to the containers in its arguments; `lengths` are those of lists before
    it. Raises LookupError where they are missing."""
    appended = dict(lengths)
    found = []
    for addition in additions:
        held = _at(given, addition.container)
        if addition.key is None:
            at = appended[addition.container]
            found.append(held[at])
            appended[addition.container] = at + 1
        else:
            found.append(held[addition.key])
    return found


def list_lengths(given: Any, additions: tuple[Addition, ...]) -> dict[Place, int]:
    """Return the lengths of the lists that a call will append to."""
    return {one.container: len(_at(given, one.container)) for one in additions if one.key is None}


def add(given: Any, additions: tuple[Addition, ...], values: list[Any]) -> None:
    """Make the same additions to the containers in these arguments."""
    for addition, value in zip(additions, values, strict=True):
        held = _at(given, addition.container)
        if addition.key is None:
            held.append(value)
        else:
            held[addition.key] = value


def _at(given: Any, place: Place) -> Any:
    held = given
    for key in place:
        held = held[key] if isinstance(held, (tuple, list, Mapping)) else getattr(held, key)
    return held
