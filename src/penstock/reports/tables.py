"""A timeline in figures: the whole above, one line a slot below."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock.core.timeline import Timeline
from penstock.reports.figures import headline, slot_figures


def summary(timeline: Timeline) -> Group:
    """Work, idleness in both views, peak activations and weight versions of every slot."""
    lines = slot_figures(timeline)
    table = Table(box=None, pad_edge=False)  # without lines between columns, so that the heads' words fit into 80
    for at, name in enumerate(lines[0]):
        table.add_column(name, justify="right" if at else "left", min_width=max(map(len, name.split())))
    for line in lines:
        table.add_row(*(Text(value) for value in line.values()))
    return Group(Text(headline(timeline), "bold"), table)
