"""Ticks of a time axis at round numbers."""

from __future__ import annotations

import math

from penstock.reports.describe import number

UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def tick_step(span: float, most: int) -> float:
    """Return the round step (1, 2 or 5 times a power of ten) that gives at most `most` steps."""
    raw = span / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1, 2, 5):
        if factor * power >= raw * (1 - 1e-9):
            return factor * power
    return 10 * power


def ticks(span: float, most: int) -> list[tuple[float, str]]:
    """Return (moment, label) of ticks from 0 to `span`, all in one unit."""
    step = tick_step(span, most)
    unit, scale = next(((u, s) for u, s in UNITS if span >= s), UNITS[-1])
    count = math.floor(span / step * (1 + 1e-9))
    return [(at * step, f"{number(at * step / scale)} {unit}") for at in range(count + 1)]
