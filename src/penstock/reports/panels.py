"""What a writer is asked to draw: one timeline, or several under their labels on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.timeline import Timeline
from penstock.errors import InputError

Timelines = Timeline | Sequence[tuple[str, Timeline]]


@dataclass(frozen=True, eq=False)
class Panel:
    """One timeline, its label, and its first moment: times are drawn from there on."""

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
    if isinstance(timelines, Timeline):
        kind = "measured" if timelines.measured else "predicted"
        return [Panel(f"{timelines.schedule.shape.name}, {kind}", timelines)]
    found = [Panel(label, timeline) for label, timeline in timelines]
    if not found:
        raise InputError("at least one timeline to draw", "none", "give a timeline, or pairs of a label and a timeline")
    return found


def title(shown: Sequence[Panel]) -> str:
    """What the picture is of: the label of a single panel, or the schedule's name and all labels."""
    if len(shown) == 1:
        return shown[0].label
    names = dict.fromkeys(panel.timeline.schedule.shape.name for panel in shown)
    return f"{' / '.join(names)}: {' over '.join(panel.label for panel in shown)}"


def longest(shown: Sequence[Panel]) -> float:
    """The length of the common time axis; never 0, so that it can be divided by."""
    return max(panel.span for panel in shown) or 1.0
