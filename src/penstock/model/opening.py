"""The choice of modules to open, to find the smallest useful stages of a model.

Only the model's structure and the path of an example decide, never sizes, so that another batch gives the same result.
Opened are torch's own containers, modules that hold a row of blocks, and modules that exist only once and contain such
a row or most of the model's weights. The blocks themselves stay whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from torch import nn

from penstock.model.cuts import CONTAINERS, is_part, openable
from penstock.model.trace import Trace

LISTS = (nn.ModuleList, nn.ModuleDict)  # containers that are never called


def to_open(model: nn.Module, closed: frozenset[str]) -> frozenset[str]:
    """Return the names of all modules to open, except those that must stay closed."""
    opened = frozenset({""})
    while further := next_to_open(model, opened, closed):
        opened |= further
    return opened


def next_to_open(model: nn.Module, opened: frozenset[str], closed: frozenset[str]) -> frozenset[str]:
    """Return the modules to open directly within open ones."""
    kinds, most = Counter(map(type, model.modules())), _size(model) / 2
    named = {id(module): name for name, module in reversed(list(model.named_modules()))}
    found = set()
    for owner in opened:
        for _, part in _parts(model.get_submodule(owner)):
            name = named[id(part)]
            if name not in opened | closed and openable(part):
                alone = kinds[type(part)] == 1 and (_has_rows(part) or _size(part) >= most)
                found |= {name} if alone or isinstance(part, CONTAINERS) or any(_rows(part)) else set()
    return frozenset(found)


def wrongly_open(model: nn.Module, opened: frozenset[str], seen: Trace) -> frozenset[str]:
    """Return open modules that, according to a trace, are blocks or are called more than once."""
    kinds = Counter(map(type, model.modules()))
    calls = Counter(event.name for event in seen.events if is_part(event))
    wrong = set()
    for name in opened - {""}:
        module = model.get_submodule(name)
        block = kinds[type(module)] > 1 and not isinstance(module, CONTAINERS)
        times = min((count for part, count in calls.items() if part.startswith(f"{name}.")), default=1)
        wrong |= {name} if times > 1 or (block and not _in_a_row(module, name, seen)) else set()
    return frozenset(wrong)


def _parts(module: nn.Module, under: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a module may call itself: its children, and those in its lists."""
    for name, child in module.named_children():
        if isinstance(child, LISTS):
            yield from _parts(child, f"{under}{name}.")
        else:
            yield f"{under}{name}", child


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _has_rows(module: nn.Module) -> bool:
    return any(isinstance(inner, CONTAINERS) or any(_rows(inner)) for inner in module.modules())


def _rows(module: nn.Module, under: str = "") -> Iterator[list[str]]:
    """Yield the lists of blocks of one kind that a module holds: the names of each."""
    for name, child in module.named_children():
        if isinstance(child, (*LISTS, nn.Sequential)):
            if isinstance(child, LISTS):
                yield from _rows(child, f"{under}{name}.")
            blocks = [(inner, type(block)) for inner, block in child.named_children() if openable(block)]
            kinds = Counter(kind for _, kind in blocks)
            row = [f"{under}{name}.{inner}" for inner, kind in blocks if kinds[kind] > 1]
            yield from [row] if row else []


def _in_a_row(module: nn.Module, name: str, seen: Trace) -> bool:
    """Whether the blocks of an open module process each other's results, and nothing from before is added at their end:
    experts, which share one input, and the convolutions of a residual block are parts of one block."""
    called = [(at, event.name) for at, event in enumerate(seen.events) if event.atom]
    inside = [at for at, part in called if part.startswith(f"{name}.")]
    end = min((at for at, _ in called if inside and at > inside[-1]), default=len(seen.events))
    for row in _rows(module):
        blocks = tuple(f"{name}.{inner}" for inner in row)
        places = [at for at, part in called if f"{part}.".startswith(tuple(f"{block}." for block in blocks))]
        if any(_feeds(seen, a, b) for a, b in pairwise(places)) and not _added_again(seen, places, end):
            return True
    return False


def _added_again(seen: Trace, places: list[int], end: int) -> bool:
    later = {value for event in seen.events[places[-1] + 1 : end] for value in event.reads}
    return bool(later.intersection(seen.events[places[0]].reads))


def _feeds(seen: Trace, source: int, reader: int) -> bool:
    """Whether an event reads a result of another, directly or through others."""
    reached: set[int] = set()
    for at in range(source, reader):
        event = seen.events[at]
        if at == source or reached.intersection(event.reads):
            reached.update(event.makes, (after for _, after in event.changes))
    return bool(reached.intersection(seen.events[reader].reads))
