"""A timeline in figures: the whole above, one line a slot below."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from penstock.core.timeline import Timeline
from penstock.reports.figures import headline, slot_figures


def summary(timeline: Timeline) -> Table:
    """Work, idleness in both views, peak activations and weight versions of every slot."""
    lines = slot_figures(timeline)
    table = Table(title=Text(headline(timeline)), title_justify="left", title_style="bold")
    for at, name in enumerate(lines[0]):
        table.add_column(name, justify="right" if at else "left")
    for line in lines:
        table.add_row(*(Text(value) for value in line.values()))
    return table
