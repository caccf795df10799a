"""Names of events and values that forwards of other numbers of rows have in common.

What ranks exchange is named by all that makes it what it is (see naming), plain numbers too, and these may be numbers
of rows: reshape(rows * length, -1) is called differently by replicas with unequal rows, and so is all that comes of it.
Between such replicas a value is named by the calls that made it alone. Where that leaves two alike, they keep their own
names: it is better not to find one than to take it for the other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from penstock.model.naming import name_of
from penstock.model.trace import Trace


@dataclass(frozen=True)
class RowNames:
    """The names, by the numbers of events and values in one trace."""

    events: tuple[int, ...]
    values: tuple[int, ...]

    @cached_property
    def event_numbers(self) -> dict[int, int]:
        return {name: at for at, name in enumerate(self.events)}

    @cached_property
    def value_numbers(self) -> dict[int, int]:
        return {name: number for number, name in enumerate(self.values)}


def row_names(seen: Trace) -> RowNames:
    """Name all events and values of a trace; what depends on inputs alone does not travel, and keeps its own name."""
    values = [value.key for value in seen.values]
    events: list[int] = []
    for event in seen.events:
        given = zip(event.places, event.reads, strict=True)
        reads = [(place, values[read]) for place, read in given if not seen.values[read].free]
        name = event.key if event.free else name_of(event.name, event.atom, *sorted(map(repr, reads)))
        events.append(name)
        if not event.free:
            for at, value in enumerate((*event.makes, *(after for _, after in event.changes))):
                if not seen.values[value].free and value not in event.reads:
                    values[value] = name_of(name, at)
    met, held = Counter(events), Counter(values)
    return RowNames(
        tuple(e.key if met[name] > 1 else name for e, name in zip(seen.events, events, strict=True)),
        tuple(v.key if held[name] > 1 else name for v, name in zip(seen.values, values, strict=True)),
    )
