"""Observers of a run: clocks, the failure watch, memory meters and tests are notified before and after each row.

The executor is not changed from outside. An event without an observer costs one empty loop.
"""

from __future__ import annotations

from typing import Any

from penstock.core.lowered_loop import ActionRow


class Observer:
    """Base class of observers: override the events of interest; each does nothing by default."""

    def begin(self, slot: int) -> None:
        """Called before rows of a slot run."""

    def before(self, row: ActionRow) -> None:
        """Called before a row runs."""

    def after(self, row: ActionRow) -> None:
        """Called after a row has run."""

    def interrupted(self) -> None:
        """Called when a row has failed."""

    def stage_begins(self, row: ActionRow) -> None:
        """Called before the stage's own computation of a row, with its weights in place."""

    def stage_ends(self, row: ActionRow) -> None:
        """Called after the stage's own computation of a row."""

    def reduced(self, stage: int, end: int) -> None:
        """Called when the sums of a stage's gradients over its replicas were waited for; `end`, by
        `perf_counter_ns`, is when they were there."""

    def update_begins(self, stage: int) -> None:
        """Called before an update of a stage."""

    def update_ends(self, stage: int) -> None:
        """Called after an update of a stage."""


EVENTS = (
    "begin", "before", "after", "interrupted", "stage_begins", "stage_ends", "reduced", "update_begins", "update_ends",
)  # fmt: skip


class Observers:
    """All observers of one pipeline's runs. Each event is a tuple of the methods to be called."""

    begin: tuple[Any, ...]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    interrupted: tuple[Any, ...]
    stage_begins: tuple[Any, ...]
    stage_ends: tuple[Any, ...]
    reduced: tuple[Any, ...]
    update_begins: tuple[Any, ...]
    update_ends: tuple[Any, ...]

    def __init__(self, *observers: Observer) -> None:
        self.all: list[Observer] = []
        self.add(*observers)

    def add(self, *observers: Observer) -> None:
        """Add observers, after those that are there."""
        self.all.extend(observers)
        self._collect()

    def discard(self, *observers: Observer | None) -> None:
        """Remove observers, if they are there; an observer may remove itself while it is called."""
        self.all = [one for one in self.all if one not in observers]
        self._collect()

    def _collect(self) -> None:
        for event in EVENTS:
            overridden = [one for one in self.all if getattr(type(one), event) is not getattr(Observer, event)]
            setattr(self, event, tuple(getattr(one, event) for one in overridden))
