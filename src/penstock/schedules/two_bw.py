"""PipeDream-2BW (Narayanan et al. 2021): gradients of m micro-batches make one version; two versions are enough.

A micro-batch of mini-batch b uses version max(b - 1, 0), forward and backward, on every stage: a delay of exactly one.
"""

from __future__ import annotations

from penstock.core.loop import Loop
from penstock.core.shape import IntArray, Law
from penstock.errors import InputError
from penstock.schedules.ask import Ask
from penstock.schedules.asynchronous import endless


def two_bw(ask: Ask) -> Loop:
    p, m = ask.stages, ask.microbatches
    if m < p:
        raise InputError(
            f"2bw's microbatches to be at least its depth of {p} stages", m, f"use {p} or more micro-batches"
        )

    def delayed(rank: int, number: IntArray, t: IntArray) -> IntArray:
        return number // m - 1

    return endless(ask.straight(Law.TWO_BW), [p - 1 - r for r in range(p)], delayed, delayed)
