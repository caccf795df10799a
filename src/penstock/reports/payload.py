"""What the page is given: a timeline's columns as base64, each in the fewest bytes that hold it, and words beside them.

An action costs some 30 characters, so a hundred thousand make a page of three megabytes.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.action import Op
from penstock.core.memory import MemoryKind
from penstock.core.timeline import Timeline
from penstock.reports.boxes import Boxes, beside, busy, waits
from penstock.reports.curves import curves
from penstock.reports.describe import KIND_WORDS, LETTERS, MEMORY_IN_A, WORDS, chunk_of_stage, in_bytes
from penstock.reports.figures import figures, slot_figures
from penstock.reports.hops import hops
from penstock.reports.palette import FILLS, KIND_FILLS, PALEST
from penstock.reports.panels import Panel, longest, title

Json = dict[str, Any]


def payload(shown: Sequence[Panel]) -> Json:
    """Everything the page draws and says."""
    return {
        "title": title(shown),
        "span": longest(shown),
        "palest": PALEST,
        "ops": [{"letter": LETTERS[op][0], "sign": LETTERS[op], "words": WORDS[op], "fill": FILLS[op]} for op in Op],
        "panels": [_panel(panel) for panel in shown],
    }


def pack(values: np.ndarray) -> Json:
    """A column as base64 of little-endian numbers: whole ones in 1, 2 or 4 bytes, others in 8."""
    if values.dtype.kind == "f":
        kind = "f8"
    else:
        low, high = int(values.min(initial=0)), int(values.max(initial=0))
        kind = next(k for k, most in (("i1", 1 << 7), ("i2", 1 << 15), ("i4", 1 << 31)) if -most <= low and high < most)
    return {"type": kind, "data": base64.b64encode(values.astype(f"<{kind}").tobytes()).decode("ascii")}


def _panel(panel: Panel) -> Json:
    timeline = panel.timeline
    shape = timeline.schedule.shape
    return {
        "label": panel.label,
        "span": panel.span,
        "microbatches": shape.microbatches,
        "chunks": shape.chunks,
        "chunk": chunk_of_stage(shape).tolist(),
        "figures": list(figures(timeline).items()),
        "slots": slot_figures(timeline),
        "boxes": _boxes(busy(timeline)),
        "beside": _boxes(beside(timeline)),
        "waits": _boxes(waits(timeline)),
        "hops": _hops(timeline),
        "memory": _memory(timeline),
    }


def _boxes(boxes: Boxes) -> Json:
    """Columns of boxes; those of the other half only where a pair is among them."""
    columns = {name: boxes.column(name) for name in ("stage", "microbatch", "version", "peer", "replica")}
    if bool((boxes.op == Op.FB).any()):
        rows, joined = boxes.schedule.rows, np.minimum(boxes.row + 1, len(boxes.schedule) - 1)
        for name in ("stage", "microbatch", "version"):
            columns[f"joined_{name}"] = np.where(boxes.op == Op.FB, getattr(rows, name)[joined], -1)
    arrays: dict[str, np.ndarray] = {"at": boxes.at, "op": boxes.op, "start": boxes.start, "end": boxes.end, **columns}
    return {name: pack(values) for name, values in arrays.items()}


def _hops(timeline: Timeline) -> Json:
    found = hops(timeline)
    rows = timeline.schedule.rows.take(found.row)
    arrays: dict[str, np.ndarray] = {
        **{"source": found.source, "target": found.target, "start": found.start, "end": found.end},
        **{"op": rows.op, "stage": rows.stage, "microbatch": rows.microbatch, "version": rows.version},
        **{"peer": rows.peer, "replica": rows.replica},
    }
    return {name: pack(values) for name, values in arrays.items()}


def _memory(timeline: Timeline) -> Json | None:
    found = curves(timeline)
    if not found:
        return None
    kinds: list[MemoryKind] = list(found[0].levels)
    return {
        "bytes": in_bytes(timeline),
        "unit": "" if in_bytes(timeline) else MEMORY_IN_A,
        "peak": max(curve.peak for curve in found),
        "kinds": [{"words": KIND_WORDS[kind], "fill": KIND_FILLS[kind]} for kind in kinds],
        "slots": [
            {"times": pack(curve.times), "levels": [pack(curve.levels[kind]) for kind in kinds]} for curve in found
        ],
    }
