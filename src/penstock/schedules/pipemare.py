"""PipeMare (Yang et al. 2021): one weight copy; forward and backward each use what is newest.

The learning rate and the backward weights are corrected for the delay, which is counted off this schedule: on rank i of
p (from 0) a forward is (p-1-i)/m updates old on average, a backward none.
"""

from __future__ import annotations

from penstock.core.loop import Loop
from penstock.core.shape import Law
from penstock.schedules.ask import Ask
from penstock.schedules.asynchronous import endless


def pipemare(ask: Ask) -> Loop:
    p, m = ask.stages, ask.microbatches
    warm = [p - 1 - r for r in range(p)]
    return endless(
        ask.straight(Law.NEWEST), warm, lambda rank, number, t: (t - warm[rank]) // m, lambda rank, number, t: t // m
    )
