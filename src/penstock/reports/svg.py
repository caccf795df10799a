"""A timeline as an SVG picture: one line per slot, coloured boxes, transfers between the lines, memory below.

The picture has its own background, light or dark according to the reader's system, and needs no other file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.core.timeline import Timeline
from penstock.reports.axis import ticks
from penstock.reports.describe import MEMORY_IN_A, in_bytes, slot_labels
from penstock.reports.figures import headline
from penstock.reports.panels import Panel, Timelines, longest, panels, title
from penstock.reports.svg_boxes import beside_lines, box_lines, hop_lines
from penstock.reports.svg_legend import kind_entries, legend_lines, operation_entries
from penstock.reports.svg_memory import MEMORY_HEIGHT, memory_lines
from penstock.reports.svg_parts import Frame, element, style, text, text_width

HEAD, LABEL, AXIS, GAP, EDGE = 40, 24, 26, 18, 16  # heights of title, labels, axis, space between parts; outer margin
LINE, INSET = 34, 4  # from one slot to the next; between a slot's line and its boxes
PEAK = 64  # room for the peaks of the memory curves, right of them


def svg(timelines: Timelines, width: int = 1200) -> str:
    """Return a standalone SVG document of one timeline, or of several on one time axis."""
    shown = panels(timelines)
    labels = [label for panel in shown for label in slot_labels(panel.timeline.schedule.shape)]
    frame = Frame(EDGE + max(map(text_width, labels)) + 12, width - EDGE - PEAK, longest(shown))
    legend, legend_height = legend_lines(operation_entries(shown), EDGE, HEAD, width - EDGE)
    top = HEAD + legend_height + GAP // 2
    body, bottom = _body(shown, frame, top)
    height = bottom + AXIS + EDGE // 2
    name = title(shown)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" '
        f'viewBox="0 0 {width} {height:g}" role="img" aria-labelledby="penstock-title penstock-desc">',
        element("title", name, id="penstock-title"),
        element("desc", "; ".join(headline(panel.timeline) for panel in shown), id="penstock-desc"),
        style(),
        element("rect", class_="ground", x=0, y=0, width=width, height=height, rx=8),
        text(name, EDGE, 26, "name"),
    )
    return "\n".join((*head, *legend, *_axis(frame, top, bottom), *body, "</svg>\n"))


def svg_compare(timelines: Sequence[tuple[str, Timeline]], width: int = 1200) -> str:
    """Return a standalone SVG document of several timelines, one below the other, on one time axis."""
    return svg(timelines, width)


def _body(shown: Sequence[Panel], frame: Frame, top: float) -> tuple[list[str], float]:
    """Return the elements of all timelines, then of the memory of each, and the lower end of the last."""
    lines: list[str] = []
    for panel in shown:
        if len(shown) > 1:
            lines.append(text(panel.label, EDGE, top + 14, "label"))
            lines.append(text(_figures(panel), frame.right, top + 14, "figures end"))
            top += LABEL
        lines += _timeline(panel, frame, top)
        top += LINE * panel.timeline.schedule.shape.slots + GAP
    for panel in shown:
        if panel.timeline.memory is not None:
            lines += _memory_head(panel, frame, top, panel.label if len(shown) > 1 else "")
            lines += memory_lines(panel, frame, top + LABEL)
            top += LABEL + MEMORY_HEIGHT * panel.timeline.schedule.shape.slots + GAP
    if len(shown) == 1:
        lines.append(text(_figures(shown[0]), frame.right, 26, "figures end"))
    return lines, top - GAP


def _figures(panel: Panel) -> str:
    return headline(panel.timeline).partition(": ")[2]


def _memory_head(panel: Panel, frame: Frame, top: float, label: str) -> list[str]:
    heading = f"memory, {label}" if label else "memory"
    heading += "" if in_bytes(panel.timeline) else f", {MEMORY_IN_A}"
    entries, _ = legend_lines(kind_entries(panel), EDGE + text_width(heading, 1.1) + 24, top + 4, float("inf"))
    return [text(heading, EDGE, top + 14, "label"), *entries]


def _timeline(panel: Panel, frame: Frame, top: float) -> Iterator[str]:
    for slot, label in enumerate(slot_labels(panel.timeline.schedule.shape)):
        y, tall = top + LINE * slot + INSET, LINE - 2 * INSET
        yield text(label, frame.left - 10, y + tall / 2 + 4, "slot end")
        yield element("rect", class_="idle", x=frame.left, y=y, width=frame.right - frame.left, height=tall)
    yield from hop_lines(panel, frame, top, LINE, INSET)
    yield from box_lines(panel, frame, top, LINE, INSET)
    yield from beside_lines(panel, frame, top, LINE, INSET)


def _axis(frame: Frame, top: float, bottom: float) -> Iterator[str]:
    for moment, label in ticks(frame.span, 12):
        x = frame.x(moment)
        yield element("line", class_="tick", x1=x, y1=top, x2=x, y2=bottom + 5)
        yield text(label, x, bottom + 19, "time mid")
