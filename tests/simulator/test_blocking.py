"""Senders that make the copy themselves, as through shared memory: the slot is held up, and never for nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Cluster, Layer, Level, Op, Plan, Profile, StagePlan, Timeline, schedule, simulate

LAYERS = tuple(Layer(str(at), 1.0, 1.0, 1.0, output_bytes=10.0) for at in range(4))
LINK = Level("link", 2, 20.0)  # half a second for what a layer sends


def timed(name: str, level: Level, parts: int = 2, chunks: int = 1) -> Timeline:
    """Four layers on two ranks, in equal stages."""
    built = schedule(name, stages=2, microbatches=parts, chunks=chunks)
    each = 4 // built.shape.stages
    stages = tuple(StagePlan(at * each, at * each + each - 1) for at in range(built.shape.stages))
    plan = Plan(stages, built.shape.placement, (((0,),), ((1,),)), name, parts)
    return simulate(built, profile=Profile(LAYERS), plan=plan, cluster=Cluster.uniform((level,)))


def rows(line: Timeline, op: Op, slot: int = 0) -> list[tuple[float, float]]:
    mine = (line.schedule.rows.op == op) & (line.schedule.slot_of_rows() == slot)
    return list(zip(line.start[mine].tolist(), line.end[mine].tolist(), strict=True))


def test_a_sender_that_copies_for_himself_is_held_up():
    """Rank 0's forwards, each followed by a copy; rank 1 begins when the first is over. In halves of a second:

    0: F F F F s F F F F s . .
    1: . . . . . F F F F . F F F F
    """
    free, held = timed("gpipe", LINK), timed("gpipe", replace(LINK, blocking=True))
    assert rows(free, Op.F) == [(0.0, 2.0), (2.0, 4.0)]
    assert rows(held, Op.F) == [(0.0, 2.0), (2.5, 4.5)]
    assert rows(free, Op.F, 1) == [(2.5, 4.5), (4.5, 6.5)]
    assert rows(held, Op.F, 1) == [(2.5, 4.5), (5.0, 7.0)]
    assert free.makespan == 19.0
    assert held.makespan == 20.0  # rank 1: two forwards, then backward, copy, backward, copy; then rank 0's backward


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved", "pipedream", "2bw"]),
    st.floats(0.01, 10.0),
    st.floats(0.0, 1.0),
)
def test_a_step_is_never_shorter_for_it_and_a_rank_loses_what_it_copies(name, seconds, latency):
    chunks = 2 if name in ("zb-v", "interleaved") else 1
    level = Level("link", 2, 10.0 / seconds, latency)
    free, held = (timed(name, replace(level, blocking=by), 4, chunks) for by in (False, True))
    assert held.makespan >= free.makespan - 1e-9
    sends, slot = np.isin(held.schedule.rows.op, (Op.SEND_F, Op.SEND_B)), held.schedule.slot_of_rows()
    copied = np.bincount(slot, np.where(sends, seconds, 0.0), 2)
    for at in range(2):
        spent = held.end[slot == at].max() - held.start[slot == at].min()
        assert spent + 1e-6 >= held.work[at] + copied[at]
