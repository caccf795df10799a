"""The legends of a picture, with entries only for what it shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.action import Op
from penstock.core.memory import MemoryKind
from penstock.reports.boxes import beside, busy
from penstock.reports.curves import curves
from penstock.reports.describe import KIND_WORDS, LETTERS, WORDS
from penstock.reports.palette import KIND_FILLS
from penstock.reports.panels import Panel
from penstock.reports.svg_parts import box_class, element, text, text_width

SWATCH, ROW, GAP = 12, 20, 18  # width of a swatch, height of a row of entries, space between entries

Entry = tuple[str, str]  # a CSS class and its description


def operations(shown: Sequence[Panel]) -> list[Op]:
    """Return the operations that have boxes, in the order of `Op`."""
    ops = [boxes.op for panel in shown for boxes in (busy(panel.timeline), beside(panel.timeline))]
    return [Op(op) for op in np.unique(np.concatenate(ops)).tolist()]


def kinds(panel: Panel) -> list[MemoryKind]:
    """Return the kinds of memory that are ever above 0, in stacking order."""
    present = {kind for curve in curves(panel.timeline) for kind in curve.levels}
    return [kind for kind in KIND_FILLS if kind in present]


def operation_entries(shown: Sequence[Panel]) -> list[Entry]:
    entries = [(box_class(op, 0, 1), f"{LETTERS[op]} {WORDS[op]}") for op in operations(shown)]
    chunks = max(panel.timeline.schedule.shape.chunks for panel in shown)
    return entries + ([(box_class(Op.F, chunks - 1, chunks), "paler: later chunks of a rank")] if chunks > 1 else [])


def kind_entries(panel: Panel) -> list[Entry]:
    return [(f"kind-{kind.value}", KIND_WORDS[kind]) for kind in kinds(panel)]


def legend_lines(entries: Sequence[Entry], left: float, top: float, right: float) -> tuple[list[str], float]:
    """Return the elements of a legend, with as many entries per row as fit, and its height."""
    lines: list[str] = []
    x, y = left, top
    for name, words in entries:
        wide = SWATCH + 6 + text_width(words)
        if x + wide > right and x > left:
            x, y = left, y + ROW
        lines += _entry(name, words, x, y)
        x += wide + GAP
    return lines, y + ROW - top


def _entry(name: str, words: str, x: float, y: float) -> list[str]:
    swatches = [element("rect", class_=f"swatch {name}", x=x, y=y, width=SWATCH, height=SWATCH, rx=2)]
    if name == box_class(Op.FB, 0, 1):  # an overlapped pair has two halves
        half = SWATCH / 2
        below = f"swatch {box_class(Op.B, 0, 1)}"
        swatches.append(element("rect", class_=below, x=x, y=y + half, width=SWATCH, height=half))
    return [*swatches, text(words, x + SWATCH + 6, y + 10, "entry")]
