"""SVG elements of every slot's memory over time, with the kinds stacked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.core.links import FloatArray
from penstock.reports.curves import Curve, curves
from penstock.reports.describe import KIND_WORDS, amount, in_bytes, slot_labels
from penstock.reports.panels import Panel
from penstock.reports.svg_parts import Frame, element, text

MEMORY_HEIGHT = 40  # from one slot to the next
INSET = 4
MOST = 4_000  # points of a curve; longer ones are thinned to the resolution of pixels


def memory_lines(panel: Panel, frame: Frame, top: float) -> Iterator[str]:
    """Yield one curve per slot, all at one scale, with its peak at the right."""
    by_slot, bytes_ = curves(panel.timeline), in_bytes(panel.timeline)
    highest = max((curve.peak for curve in by_slot), default=0.0) or 1.0
    tall = MEMORY_HEIGHT - INSET
    for slot, label in enumerate(slot_labels(panel.timeline.schedule.shape)):
        base = top + MEMORY_HEIGHT * (slot + 1)
        curve = by_slot[slot]
        yield text(label, frame.left - 10, base - tall / 2 + 4, "slot end")
        yield f'<g class="memory">{element("title", f"{label}: peak {amount(curve.peak, bytes_)}")}'
        yield from _areas(curve, frame, base, panel.span, tall / highest)
        yield "</g>"
        yield element("line", class_="base", x1=frame.left, y1=base, x2=frame.right, y2=base)
        yield text(amount(curve.peak, bytes_), frame.right + 6, base - 4, "peak")


def _areas(curve: Curve, frame: Frame, base: float, span: float, scale: float) -> Iterator[str]:
    shown = curve.thinned(1 / frame.scale) if len(curve.times) > MOST else curve
    x = frame.left + np.append(shown.times, span) * frame.scale
    below = np.zeros(len(shown.times))
    for kind, level in shown.levels.items():
        above = below + level
        if level.any():
            points = _stairs(x, base - above * scale) + _stairs(x, base - below * scale)[::-1]
            path = "M" + "L".join(f"{at:.5g},{up:.5g}" for at, up in points) + "Z"
            yield element("path", KIND_WORDS[kind], class_=f"kind-{kind.value}", d=path)
        below = above


def _stairs(x: FloatArray, y: FloatArray) -> list[tuple[float, float]]:
    """Return the corners of a step function: y[i] from x[i] to x[i + 1]."""
    return list(zip(np.repeat(x, 2)[1:-1].tolist(), np.repeat(y, 2).tolist(), strict=True))
