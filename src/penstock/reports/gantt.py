"""A timeline drawn to scale in a terminal: letters, micro-batch numbers where they fit, and dots for idle time.

    rank 0  F0─F1─F2─F3─......B0────B1────B2────B3────
    rank 1  ...F0─F1─F2─F3─B0────B1────B2────B3────...
            0 s       10 s      20 s      30 s      40 s

Each column shows the action at the middle of its time span. The lines that fill a box have the colour of the box, so
that they are visible only without colours. Odd chunks of a rank are in lower case.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from rich.style import Style
from rich.text import Text

from penstock.core.action import Action, Op
from penstock.core.schedule import LongArray
from penstock.core.timeline import Timeline
from penstock.reports.axis import ticks
from penstock.reports.boxes import Boxes, busy
from penstock.reports.describe import LETTERS, WORDS, chunk_of_stage, slot_labels
from penstock.reports.palette import ink, shade
from penstock.reports.panels import Panel, longest

IDLE, FILL = ".", "─"
QUIET = Style(dim=True)
FEWEST = 10  # columns of time in the narrowest terminal
TICK_ROOM = 12  # columns that a label of the axis may take


def gantt(timeline: Timeline, width: int = 100) -> Text:
    """Return one line per slot, `width` columns wide with its label, and an axis and a legend below."""
    boxes, labels = busy(timeline), slot_labels(timeline.schedule.shape)
    margin = max(map(len, labels)) + 2
    columns = max(FEWEST, width - margin)
    span = longest([Panel("", timeline)])
    painter = _Painter(boxes)
    text = Text(no_wrap=True, overflow="ignore")
    for slot, label in enumerate(labels):
        text.append(label.ljust(margin), QUIET)
        painter.line(text, _columns(boxes, slot, columns, span))
        text.append("\n")
    text.append(" " * margin + _axis(span, columns), QUIET)
    painter.legend(text, margin, columns)
    return text


def _columns(boxes: Boxes, slot: int, columns: int, span: float) -> LongArray:
    """Return the box of each column of a slot's line, -1 where it is idle."""
    own = boxes.of_slot(slot)
    if not own:
        return np.full(columns, -1, dtype=np.int64)
    middle = (np.arange(columns) + 0.5) * span / columns
    box = np.searchsorted(boxes.start[own.start : own.stop], middle, side="right") - 1 + own.start
    return np.where((box >= own.start) & (boxes.end[box] > middle), box, -1)


def _axis(span: float, columns: int) -> str:
    line = [" "] * columns
    for moment, label in ticks(span, columns // TICK_ROOM):
        at = round(moment / span * columns)
        if at + len(label) <= columns:
            line[at : at + len(label)] = label
    return "".join(line).rstrip()


class _Painter:
    """Writer of boxes in the style of their operation and chunk."""

    def __init__(self, boxes: Boxes) -> None:
        shape = boxes.schedule.shape
        self.boxes, self.chunk, self.chunks = boxes, chunk_of_stage(shape), shape.chunks

    def line(self, text: Text, columns: LongArray) -> None:
        """Append a slot's line: one box for each run of equal columns."""
        edges = np.flatnonzero(np.diff(columns, prepend=-2, append=-2))
        for first, last in pairwise(edges.tolist()):
            box = int(columns[first])
            if box < 0:
                text.append(IDLE * (last - first), QUIET)
            else:
                self._box(text, box, last - first)

    def _box(self, text: Text, box: int, room: int) -> None:
        """Append a box; an overlapped pair is written as F5&B2, each half in its own colour."""
        action = self.boxes.action(box)
        half = room if action.joined is None else room // 2
        self._part(text, action, "", half)
        if action.joined is not None:
            self._part(text, action.joined, "&", room - half)

    def _part(self, text: Text, action: Action, lead: str, room: int) -> None:
        chunk = int(self.chunk[action.stage])
        letter = lead + (LETTERS[action.op][0].lower() if chunk % 2 else LETTERS[action.op][0])
        name = letter + (str(action.microbatch) if action.microbatch >= 0 else "")
        name = (name if len(name) <= room else letter)[:room]
        fill = shade(action.op, chunk, self.chunks)
        text.append(name, Style(color=ink(fill), bgcolor=fill))
        text.append(FILL * (room - len(name)), Style(color=fill, bgcolor=fill))

    def legend(self, text: Text, margin: int, columns: int) -> None:
        """Append the legend of the drawn operations, in as many lines as needed."""
        entries = [(LETTERS[op], WORDS[op], shade(op)) for op in map(Op, np.unique(self.boxes.op).tolist())]
        entries.append((IDLE, "idle", ""))
        if self.chunks > 1:
            entries.append(("f b", "odd chunks of a rank", ""))
        used = columns
        for sign, words, fill in entries:
            size = len(sign) + 1 + len(words)
            if used + 2 + size > columns:
                text.append("\n" + " " * margin)
                used = 0
            else:
                text.append("  ")
                used += 2
            text.append(sign, Style(color=ink(fill), bgcolor=fill) if fill else QUIET)
            text.append(f" {words}", QUIET)
            used += size
