"""The data of the HTML page: a timeline's columns as base64, each in the smallest type that fits, and text.

An action takes about 30 characters, so that a hundred thousand make a page of three megabytes.
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
    """Return all data of the page as JSON."""
    return {
        "title": title(shown),
        "span": longest(shown),
        "palest": PALEST,
        "ops": [{"letter": LETTERS[op][0], "sign": LETTERS[op], "words": WORDS[op], "fill": FILLS[op]} for op in Op],
        "panels": [_panel(panel) for panel in shown],
    }


def pack(values: np.ndarray) -> Json:
    """Return a column as base64 of little-endian numbers: integers of 1, 2 or 4 bytes, floats of 8."""
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
    """Return the columns of boxes, with those of overlapped backwards if there are any."""
    columns = {name: boxes.column(name) for name in ("stage", "microbatch", "version", "peer", "replica")}
    if bool((boxes.op == Op.FB).any()):
        rows, joined = boxes.schedule.rows, np.minimum(boxes.row + 1, len(boxes.schedule) - 1)
        for name in ("stage", "microbatch", "version"):
            columns[f"joined_{name}"] = np.where(boxes.op == Op.FB, getattr(rows, name)[joined], -1)
    arrays: dict[str, np.ndarray] = {"at": boxes.at, "op": boxes.op, "start": boxes.start, "end": boxes.end, **columns}
    return {name: pack(values) for name, values in arrays.items()}


def _hops(timeline: Timeline) -> Json:
    transfers = hops(timeline)
    rows = timeline.schedule.rows.take(transfers.row)
    arrays: dict[str, np.ndarray] = {
        **{"source": transfers.source, "target": transfers.target, "start": transfers.start, "end": transfers.end},
        **{"op": rows.op, "stage": rows.stage, "microbatch": rows.microbatch, "version": rows.version},
        **{"peer": rows.peer, "replica": rows.replica},
    }
    return {name: pack(values) for name, values in arrays.items()}


def _memory(timeline: Timeline) -> Json | None:
    by_slot = curves(timeline)
    if not by_slot:
        return None
    kinds: list[MemoryKind] = list(by_slot[0].levels)
    return {
        "bytes": in_bytes(timeline),
        "unit": "" if in_bytes(timeline) else MEMORY_IN_A,
        "peak": max(curve.peak for curve in by_slot),
        "kinds": [{"words": KIND_WORDS[kind], "fill": KIND_FILLS[kind]} for kind in kinds],
        "slots": [
            {"times": pack(curve.times), "levels": [pack(curve.levels[kind]) for kind in kinds]} for curve in by_slot
        ],
    }
