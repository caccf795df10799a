"""A timeline in the trace-event format that Perfetto and Chrome's tracing page read.

Each timeline is a process, and each slot a thread, in rank order. Below a slot's thread are threads for its sends and
reductions, as many as needed so that none overlap on a thread. Arrows lead from the action that produces a tensor to
the one that uses it. Times are in microseconds from the start of the timeline.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.core.action import Action, Op
from penstock.core.links import FloatArray
from penstock.core.schedule import LongArray
from penstock.core.shape import IntArray
from penstock.core.timeline import Timeline
from penstock.reports.boxes import busy
from penstock.reports.curves import curves
from penstock.reports.describe import WORDS, slot_labels
from penstock.reports.hops import hops
from penstock.reports.panels import Panel, Timelines, panels

MICRO = 1e6
INSIDE = 1e-3  # microseconds, the resolution of the readers: an arrow must begin inside its slice
FIRST = 1  # thread of slot 0: readers reserve 0 for a system thread
STRIDE = 1_000  # difference of sort indices from one slot to the next

Event = dict[str, Any]


def trace(timelines: Timelines) -> str:
    """Return the trace as JSON text; several timelines become several processes."""
    shown = panels(timelines)
    events = [event for pid, panel in enumerate(shown, 1) for event in _events(panel, pid, len(shown))]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _events(panel: Panel, pid: int, processes: int) -> Iterator[Event]:
    labels = slot_labels(panel.timeline.schedule.shape)
    yield _metadata(pid, 0, "process_name", name=panel.label)
    for slot, label in enumerate(labels):
        yield from _thread(pid, FIRST + slot, label, STRIDE * slot)
    yield from _compute(panel.timeline, pid)
    yield from _beside(panel, pid, labels)
    yield from _arrows(panel, pid, processes)
    yield from _memory(panel.timeline, pid, labels)


def _metadata(pid: int, tid: int, kind: str, **arguments: str | int) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": arguments}


def _thread(pid: int, tid: int, name: str, order: int) -> Iterator[Event]:
    yield _metadata(pid, tid, "thread_name", name=name)
    yield _metadata(pid, tid, "thread_sort_index", sort_index=order)


def _slice(pid: int, tid: int, action: Action, start: float, end: float, per_batch: int) -> Event:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": _micro(start),
        "dur": max(_micro(end) - _micro(start), 0.0),
        "name": str(action),
        "cat": WORDS[action.op],
        "args": dict(_details(action, per_batch)),
    }


def _details(action: Action, per_batch: int) -> Iterator[tuple[str, str | int]]:
    yield "operation", WORDS[action.op]
    yield "stage", action.stage
    if action.microbatch >= 0:
        yield "micro-batch", action.microbatch
        yield "mini-batch", action.microbatch // per_batch
    yield "weight version", action.version
    if action.peer >= 0:
        yield "to stage", action.peer
        yield "to replica", action.replica
    if action.joined is not None:
        yield "overlaps", str(action.joined)


def _compute(timeline: Timeline, pid: int) -> Iterator[Event]:
    boxes, per_batch = busy(timeline), timeline.schedule.shape.microbatches
    for box in range(len(boxes)):
        start, end = float(boxes.start[box]), float(boxes.end[box])
        yield _slice(pid, FIRST + int(boxes.slot[box]), boxes.action(box), start, end, per_batch)


def _beside(panel: Panel, pid: int, labels: list[str]) -> Iterator[Event]:
    """Yield sends and reductions, each on the first free thread of its slot."""
    schedule = panel.timeline.schedule
    row = np.flatnonzero(np.isin(schedule.rows.op, (Op.SEND_F, Op.SEND_B, Op.REDUCE)))
    slot = schedule.slot_of_rows()[row]
    start, end = panel.timeline.start[row] - panel.origin, panel.timeline.end[row] - panel.origin
    places = list(zip(slot.tolist(), assign_lanes(slot, start, end).tolist(), strict=True))
    threads = {place: FIRST + len(labels) + tid for tid, place in enumerate(sorted(set(places)))}
    for (at, lane), tid in threads.items():
        name = f"{labels[at]} links" + (f" {lane + 1}" if lane else "")
        yield from _thread(pid, tid, name, STRIDE * at + 1 + lane)
    for i, place in enumerate(places):
        action = schedule.action(int(row[i]))
        yield _slice(pid, threads[place], action, float(start[i]), float(end[i]), schedule.shape.microbatches)


def _arrows(panel: Panel, pid: int, processes: int) -> Iterator[Event]:
    """Yield arrows from the end of the slice that produces a tensor to the start of the one that uses it."""
    transfers, timeline = hops(panel.timeline), panel.timeline
    for hop in np.flatnonzero((transfers.maker >= 0) & (transfers.user >= 0)).tolist():
        maker, user = int(transfers.maker[hop]), int(transfers.user[hop])
        produced = _micro(float(timeline.end[maker]) - panel.origin)
        length = produced - _micro(float(timeline.start[maker]) - panel.origin)
        used = _micro(float(timeline.start[user]) - panel.origin)
        same = {"pid": pid, "id": hop * processes + pid, "name": "tensor", "cat": "transfer"}
        yield {"ph": "s", "tid": FIRST + int(transfers.source[hop]), "ts": produced - min(INSIDE, length / 2), **same}
        yield {"ph": "f", "bp": "e", "tid": FIRST + int(transfers.target[hop]), "ts": used, **same}


def _memory(timeline: Timeline, pid: int, labels: list[str]) -> Iterator[Event]:
    """Yield one counter per slot, with its kinds stacked."""
    for slot, curve in enumerate(curves(timeline)):
        levels = {kind.value: level.tolist() for kind, level in curve.levels.items()}
        for at, moment in enumerate(curve.times.tolist() if levels else []):
            arguments = {kind: level[at] for kind, level in levels.items()}
            name = f"memory {labels[slot]}"
            yield {"ph": "C", "pid": pid, "tid": FIRST + slot, "ts": _micro(moment), "name": name, "args": arguments}


def assign_lanes(slot: IntArray, start: FloatArray, end: FloatArray) -> LongArray:
    """Return a lane for every span, the lowest free one, so that spans of one slot do not overlap on a lane."""
    lane = np.zeros(len(slot), dtype=np.int64)
    ending: list[tuple[float, int]] = []  # (end, lane) of the unfinished spans of the current slot
    free: list[int] = []
    last, used = -1, 0
    for i in np.lexsort((end, start, slot)).tolist():
        if slot[i] != last:
            last, used, ending, free = int(slot[i]), 0, [], []
        while ending and ending[0][0] <= start[i]:
            heapq.heappush(free, heapq.heappop(ending)[1])
        if not free:
            heapq.heappush(free, used)
            used += 1
        lane[i] = heapq.heappop(free)
        heapq.heappush(ending, (float(end[i]), int(lane[i])))
    return lane


def _micro(seconds: float) -> float:
    """Convert to microseconds, rounded to a thousandth of a nanosecond."""
    return round(seconds * MICRO, 6)
