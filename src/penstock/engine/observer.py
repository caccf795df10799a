"""Observers of a run: clocks, the failure watch, memory meters and tests are told before and after each row.

Nobody changes the executor from outside. An event without an observer costs one empty loop.
"""

from __future__ import annotations

from typing import Any

from penstock.core.lowered_loop import ActionRow


class Observer:
    """Override the events that matter; each does nothing by default."""

    def begin(self, slot: int) -> None:
        """Rows of a slot are about to run."""

    def before(self, row: ActionRow) -> None:
        """A row is about to run."""

    def after(self, row: ActionRow) -> None:
        """A row has run."""

    def interrupted(self) -> None:
        """A row has failed."""

    def stage_begins(self, row: ActionRow) -> None:
        """The stage's own computation of a row begins: its weights are in place."""

    def stage_ends(self, row: ActionRow) -> None:
        """The stage's own computation of a row has ended."""

    def update_begins(self, stage: int) -> None:
        """An update of a stage begins."""

    def update_ends(self, stage: int) -> None:
        """An update of a stage has ended."""


EVENTS = ("begin", "before", "after", "interrupted", "stage_begins", "stage_ends", "update_begins", "update_ends")


class Observers:
    """All observers of one pipeline's runs; each event is a tuple of the methods to be called."""

    begin: tuple[Any, ...]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    interrupted: tuple[Any, ...]
    stage_begins: tuple[Any, ...]
    stage_ends: tuple[Any, ...]
    update_begins: tuple[Any, ...]
    update_ends: tuple[Any, ...]

    def __init__(self, *observers: Observer) -> None:
        self.all: list[Observer] = []
        self.add(*observers)

    def add(self, *observers: Observer) -> None:
        """Tell these from now on, too, after those that were there before."""
        self.all.extend(observers)
        self._collect()

    def discard(self, *observers: Observer | None) -> None:
        """Tell these no longer, if they were told; an observer may take itself away while it is told."""
        self.all = [one for one in self.all if one not in observers]
        self._collect()

    def _collect(self) -> None:
        for event in EVENTS:
            overridden = [one for one in self.all if getattr(type(one), event) is not getattr(Observer, event)]
            setattr(self, event, tuple(getattr(one, event) for one in overridden))
