"""A timeline in figures: the whole above, one line a slot below."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from penstock.core.timeline import Timeline
from penstock.reports.describe import amount, headline, in_bytes, number, percent, seconds, slot_labels


def summary(timeline: Timeline) -> Table:
    """Work, idleness in both views, peak activations and weight versions of every slot."""
    shape, bytes_ = timeline.schedule.shape, in_bytes(timeline)
    counted = timeline.memory is not None
    table = Table(title=Text(headline(timeline)), title_justify="left", title_style="bold")
    table.add_column("slot")
    for name in ("stages", "work", "idle", "of makespan", "idle, own view", "peak activations", "weight versions"):
        table.add_column(name, justify="right")
    span, idle, own = timeline.makespan, timeline.idle, timeline.idle_own
    peaks, versions = timeline.peak_activations, timeline.weight_versions
    for slot, label in enumerate(slot_labels(shape)):
        table.add_row(
            label,
            " ".join(str(stage) for stage in shape.stages_of(int(shape.slot_rank[slot]))),
            seconds(float(timeline.work[slot])),
            seconds(float(idle[slot])),
            percent(float(idle[slot]) / span) if span > 0 else "-",
            seconds(float(own[slot])),
            amount(float(peaks[slot]), bytes_) if counted else "-",
            number(float(versions[slot])),
        )
    return table
