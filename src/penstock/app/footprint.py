"""Bytes of memory that this process has, and has had at most."""

from __future__ import annotations

from penstock.engine.measure.peak_memory import highest, resident

peak = highest

__all__ = ["peak", "resident"]
