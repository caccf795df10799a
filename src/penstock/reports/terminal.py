"""What a terminal shows: the grid of words, the timeline to scale, and a table of figures."""

from penstock.reports.gantt import gantt
from penstock.reports.grid import grid
from penstock.reports.tables import summary

__all__ = ["gantt", "grid", "summary"]
