"""The timelines of a picture: one, or several with labels on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.timeline import Timeline
from penstock.errors import InputError

Timelines = Timeline | Sequence[tuple[str, Timeline]]


@dataclass(frozen=True, eq=False)
class Panel:
    """One timeline and its label. Times are drawn relative to its start, `origin`."""

    label: str
    timeline: Timeline

    @property
    def origin(self) -> float:
        return float(self.timeline.start.min()) if len(self.timeline.start) else 0.0

    @property
    def span(self) -> float:
        """Seconds from the first start to the last end."""
        return float(self.timeline.end.max()) - self.origin if len(self.timeline.end) else 0.0


def panels(timelines: Timelines) -> list[Panel]:
    """Return the panels of one timeline, or of several with their labels."""
    if isinstance(timelines, Timeline):
        kind = "measured" if timelines.measured else "predicted"
        return [Panel(f"{timelines.schedule.shape.name}, {kind}", timelines)]
    labelled = [Panel(label, timeline) for label, timeline in timelines]
    if not labelled:
        raise InputError("at least one timeline to draw", "none", "give a timeline, or pairs of a label and a timeline")
    return labelled


def title(shown: Sequence[Panel]) -> str:
    """Return the title of a picture: the label of a single panel, or the schedule's name and all labels."""
    if len(shown) == 1:
        return shown[0].label
    names = dict.fromkeys(panel.timeline.schedule.shape.name for panel in shown)
    return f"{' / '.join(names)}: {' over '.join(panel.label for panel in shown)}"


def longest(shown: Sequence[Panel]) -> float:
    """Return the length of the common time axis, never 0, so that callers can divide by it."""
    return max(panel.span for panel in shown) or 1.0
