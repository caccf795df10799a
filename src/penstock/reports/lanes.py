"""Spans that may overlap, spread over as few lanes as they need."""

from __future__ import annotations

import heapq

import numpy as np

from penstock.core.links import FloatArray
from penstock.core.schedule import LongArray
from penstock.core.shape import IntArray


def lanes(slot: IntArray, start: FloatArray, end: FloatArray) -> LongArray:
    """A lane for every span so that no two of one slot overlap on it: the lowest that is free."""
    lane = np.zeros(len(slot), dtype=np.int64)
    ending: list[tuple[float, int]] = []  # of the slot at hand: (end, lane) of the spans that go on
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
