"""A path through a model: its trace, the starts of its stages, and the values sent between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from penstock.errors import SplitError
from penstock.model.allowed import refusal
from penstock.model.kinds import Kind
from penstock.model.passage import Passage
from penstock.model.row_names import RowNames, row_names
from penstock.model.state import State
from penstock.model.trace import Trace

MANY = 4096  # sizes of inputs to remember


@dataclass(frozen=True)
class Path:
    """A path through a model: its trace, the starts of its stages, and the values sent between them."""

    trace: Trace
    starts: tuple[int, ...]
    incoming: tuple[dict[int, int], ...]  # by stage: value -> the stage that computes it
    outgoing: tuple[frozenset[int], ...]
    changed: tuple[frozenset[int], ...]  # by stage: incoming values that it changes in place
    sizes: dict[Any, Passage] = field(default_factory=dict)  # sizes of inputs that take it, and the facts exchanged
    states: dict[int, State] = field(default_factory=dict)  # state of the modules that each stage runs
    calls: dict[int, bool] = field(default_factory=dict)  # whether a stage is a single call
    numbers: set[Any] = field(default_factory=set)  # numbers on open modules for which inputs are known to take it

    def span(self, stage: int) -> tuple[int, int]:
        ends = (*self.starts[1:], len(self.trace.events))
        return self.starts[stage], ends[stage]

    def is_one_call(self, stage: int) -> bool:
        """Whether a stage is a single call, from one tensor to one tensor."""
        known = self.calls.get(stage)
        if known is None:
            known = self.calls[stage] = self._looks_like_one_call(stage)
        return known

    def _looks_like_one_call(self, stage: int) -> bool:
        first, last = self.span(stage)
        if (first, last) != (stage, stage + 1) or self.changed[stage] or self.trace.inputs:
            return False
        event = self.trace.events[first]
        given = tuple(self.incoming[stage]) == (self.trace.events[stage - 1].makes if stage else ())
        given = given and all(type(result) is torch.Tensor for result in self.trace.results[max(stage - 1, 0) : last])
        plain = event.atom and not event.changes and not event.talks and not event.buffers and event.region is None
        alone = not self.trace.sides and not self.trace.withheld and not self.trace.buffers
        ends = stage < len(self.starts) - 1 or self.trace.returned == event.makes
        return given and plain and alone and ends and len(event.makes) == 1

    def noted(self, kind: Kind, told: Passage) -> Path:
        if max(len(self.sizes), len(self.numbers)) >= MANY:
            self.sizes.clear()
            self.numbers.clear()
        self.sizes.setdefault(kind.sizes, told)
        self.numbers.add(kind.numbers)
        return self

    def stage_of(self, event: int) -> int:
        return bisect_right(self.starts, event) - 1

    @cached_property
    def routes(self) -> tuple[dict[int, tuple[int, ...]], ...]:
        """Values by the stage that reads them, for each stage that computes them."""
        found: tuple[dict[int, tuple[int, ...]], ...] = tuple({} for _ in self.incoming)
        for stage, values in enumerate(self.incoming):
            for value, source in values.items():
                found[source][stage] = (*found[source].get(stage, ()), value)
        return found

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted((source, stage) for source, readers in enumerate(self.routes) for stage in readers))

    @cached_property
    def layer_inputs(self) -> frozenset[int]:
        """Inputs read by layers of the last stage; it may use others, such as labels, for a loss alone."""
        origins: dict[int, frozenset[int]] = {}
        found: set[int] = set()
        for at, event in enumerate(self.trace.events):
            given = frozenset[int]().union(
                *(origins.get(v, {v} if self.trace.values[v].made_by < 0 else ()) for v in event.reads)
            )
            if at >= self.starts[-1] and event.parameters:
                found |= given
            elif event.free or at >= self.starts[-1]:
                origins |= dict.fromkeys((*event.makes, *(after for _, after in event.changes)), given)
        return frozenset(found)

    @cached_property
    def crossing(self) -> dict[int, int]:
        """Values that are sent between stages, by the names that are equal in all processes."""
        keys = self.trace.values
        return {keys[value].key: value for values in self.incoming for value in values}

    @cached_property
    def row_names(self) -> RowNames:
        """Names that forwards of other numbers of rows know events and values by."""
        return row_names(self.trace)

    def describe(self, value: int) -> str:
        """Return a description of a value: the event that computed it, and where that is called."""
        event = self.trace.events[self.trace.values[value].made_by]
        return f"the result of {event.name!r} at {event.line}"


def path_through(
    seen: Trace, cuts: list[tuple[str, int]], homes: Mapping[str, int], edges: tuple[tuple[int, int], ...]
) -> Path:
    """Return the path of a forward that is cut at the n-th calls of modules; raise where stages could not do together
    what it does across a cut.

    A value is sent directly to another stage if the example's path has that edge (`edges`), else from neighbour to
    neighbour: a schedule has transfers for the example's edges alone.
    """
    starts = starts_of(seen, cuts, homes)
    for reason in filter(None, (refusal(seen, cut) for cut in starts[1:] if 0 < cut < len(seen.events))):
        raise reason

    def stage_of(event: int) -> int:
        return bisect_right(starts, event) - 1

    incoming: tuple[dict[int, int], ...] = tuple({} for _ in starts)
    outgoing: list[set[int]] = [set() for _ in starts]
    changed: list[set[int]] = [set() for _ in starts]
    for number, value in enumerate(seen.values):
        if value.made_by < 0 or value.free:
            continue
        source = stage_of(value.made_by)
        for reader in {stage_of(event) for event in value.read_by} - {source}:
            for giver, taker in _ways(source, reader, edges):
                incoming[taker][number] = giver
                outgoing[giver].add(number)
    for at, event in enumerate(seen.events):
        for before, _ in event.changes:
            if before in incoming[stage_of(at)]:
                changed[stage_of(at)].add(before)
    return Path(seen, starts, incoming, tuple(map(frozenset, outgoing)), tuple(map(frozenset, changed)))


def _ways(source: int, reader: int, edges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    if not edges or (source, reader) in edges:
        return [(source, reader)]
    return [(stage, stage + 1) for stage in range(source, reader)]


def starts_of(seen: Trace, cuts: list[tuple[str, int]], homes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the event at which each stage begins, for cuts at the n-th calls of modules.

    On a path that leaves such a module out, as with layers that are dropped, the stage begins at the first module of
    its own or of a later stage; `homes` are the stages of modules, where they are known from another path.
    """
    starts = [0]
    for stage, (name, nth) in enumerate(cuts, 1):
        calls = [at for at, event in enumerate(seen.events) if event.atom and event.name == name]
        if len(calls) > nth:
            start = calls[nth]
        elif homes:
            start = _begins(seen, stage, homes, starts[-1])
        else:
            raise SplitError(
                "cuts at modules that the forward calls", repr(name), "name a module that is called itself"
            )
        if start <= starts[-1] and not homes:
            raise SplitError(
                "cuts in the order of the forward, each stage with something to run",
                ", ".join(name for name, _ in cuts),
                "order them as the model calls them, and start after its first module",
            )
        starts.append(max(start, starts[-1]))
    if not homes and not any(event.atom or event.parameters for event in seen.events[: starts[1] if cuts else None]):
        raise SplitError("a first stage with something to run", repr(cuts[0][0] if cuts else ""), "start it later")
    return tuple(starts)


def _begins(seen: Trace, stage: int, homes: Mapping[str, int], after: int) -> int:
    for at, event in enumerate(seen.events):
        if at >= after and event.atom and homes.get(event.name, -1) >= stage:
            return at
    return len(seen.events)
