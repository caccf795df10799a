"""SVG elements of the boxes, reductions and transfers of one timeline."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.core.action import Action, Op
from penstock.core.schedule import LongArray
from penstock.reports.boxes import Boxes, beside, busy
from penstock.reports.describe import WORDS, chunk_of_stage, seconds
from penstock.reports.hops import hops
from penstock.reports.panels import Panel
from penstock.reports.svg_parts import Frame, box_class, element, text

NARROWEST = 0.75  # least width of a box in pixels, so that very short ones are visible
DIGIT = 6.6  # pixels of a digit of a box's number
MOST = 20_000  # elements of a kind; if there are more, one is drawn per pixel
BESIDE = 5  # height of a reduction's bar, at the lower edge of its line


def box_lines(panel: Panel, frame: Frame, top: float, line: float, inset: float) -> Iterator[str]:
    """Yield one box per action; an overlapped pair has its forward above its backward."""
    boxes = busy(panel.timeline)
    shape = panel.timeline.schedule.shape
    chunk = chunk_of_stage(shape)
    for box in _visible(boxes, frame).tolist():
        action, slot = boxes.action(box), int(boxes.slot[box])
        x, width = frame.x(float(boxes.start[box])), float(boxes.end[box] - boxes.start[box]) * frame.scale
        parts = (action,) if action.joined is None else (action, action.joined)
        height = (line - 2 * inset) / len(parts)
        yield f"<g>{element('title', _tip(action, boxes, box))}"
        for at, part in enumerate(parts):
            y = top + line * slot + inset + at * height
            shade = box_class(part.op, int(chunk[part.stage]), shape.chunks)
            kind = f"{'joined ' if at else ''}{'thin ' if width < 3 else ''}box {shade}"
            yield element("rect", class_=kind, x=x, y=y, width=max(width, NARROWEST), height=height)
            yield from _number(part, x + width / 2, y + height / 2, width, shade, half=len(parts) > 1)
        yield "</g>"


def _number(part: Action, x: float, y: float, width: float, shade: str, half: bool) -> Iterator[str]:
    """Yield the number of the micro-batch, if it fits."""
    label = str(part.microbatch)
    if part.microbatch >= 0 and width >= DIGIT * len(label) + 2:
        yield text(label, x, y + (3.2 if half else 4), f"number {'half ' if half else ''}on-{shade}")


def _tip(action: Action, boxes: Boxes, box: int) -> str:
    start, end = float(boxes.start[box]), float(boxes.end[box])
    return f"{action}: {WORDS[action.op]}, {seconds(start)} to {seconds(end)}, {seconds(end - start)}"


def beside_lines(panel: Panel, frame: Frame, top: float, line: float, inset: float) -> Iterator[str]:
    """Yield reductions as thin bars over the compute that they overlap with."""
    boxes = beside(panel.timeline)
    for box in _visible(boxes, frame).tolist():
        start, end = float(boxes.start[box]), float(boxes.end[box])
        yield f"<g>{element('title', _tip(boxes.action(box), boxes, box))}"
        yield element(
            "rect",
            class_=f"bar {box_class(Op.REDUCE, 0, 1)}",
            x=frame.x(start),
            y=top + line * (int(boxes.slot[box]) + 1) - inset - BESIDE,
            width=max((end - start) * frame.scale, NARROWEST),
            height=BESIDE,
        )
        yield "</g>"


def hop_lines(panel: Panel, frame: Frame, top: float, line: float, inset: float) -> Iterator[str]:
    """Yield transfers as lines from their sender at their start to their receiver at their end."""
    transfers, op = hops(panel.timeline), panel.timeline.schedule.rows.op
    which = np.arange(len(transfers))
    if len(transfers) > MOST:
        pixel = np.floor(transfers.start * frame.scale).astype(np.int64)
        which = np.unique(np.stack((transfers.source, transfers.target, pixel)), axis=1, return_index=True)[1]
    for hop in which.tolist():
        source, target = int(transfers.source[hop]), int(transfers.target[hop])
        down = target > source
        yield element(
            "line",
            class_=f"hop {Op(int(op[transfers.row[hop]])).name.lower()}",
            x1=frame.x(float(transfers.start[hop])),
            y1=top + line * (source + down) - (inset if down else -inset),
            x2=frame.x(float(transfers.end[hop])),
            y2=top + line * (target + (not down)) + (inset if down else -inset),
        )


def _visible(boxes: Boxes, frame: Frame) -> LongArray:
    """Return all boxes, or the longest of each pixel if there are too many."""
    if len(boxes) <= MOST:
        return np.arange(len(boxes))
    pixel = np.floor(boxes.start * frame.scale).astype(np.int64)
    order = np.lexsort((boxes.start - boxes.end, pixel, boxes.slot))
    slot, pixel = boxes.slot[order], pixel[order]
    first = np.append(True, (slot[1:] != slot[:-1]) | (pixel[1:] != pixel[:-1]))
    return np.sort(order[first])
