"""A run of unknown length, taken pass by pass, is the run that unrolling would have made."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.action import Op
from penstock.core.lower import lower
from penstock.core.lowered_loop import ActionRow, LoweredLoop
from penstock.schedules.registry import loop

METHODS = ["pipedream", "pipedream vertical", "pipedream newest", "2bw", "pipemare"]


def made(method: str, stages: int, parts: int, replicas: list[int] | int = 1) -> LoweredLoop:
    name, _, how = method.partition(" ")
    options = {"vertical": {"vertical_sync": True}, "newest": {"stash": False}, "": {}}[how]
    parts = max(parts, stages) if name == "2bw" else parts
    return LoweredLoop(loop(name, stages=stages, microbatches=parts, replicas=replicas, **options))


def plain(endless: LoweredLoop, batches: int, slot: int) -> list[ActionRow]:
    full = lower(endless.loop.unroll(batches))
    columns = (column[full.starts[slot] : full.starts[slot + 1]].tolist() for column in full.rows.columns()[:6])
    replica = int(full.shape.slot_replica[slot])
    return [ActionRow(Op(op), *rest, replica) for op, *rest in zip(*columns, strict=True)]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(METHODS), st.integers(1, 5), st.integers(1, 6), st.integers(1, 30), st.data())
def test_passes_and_rest_are_the_unrolled_list(method, stages, parts, batches, data):
    require_same_rows(made(method, stages, parts), batches, data)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["pipedream", "pipedream vertical", "2bw"]),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 20),
    st.data(),
)
def test_so_they_are_with_replicas_whose_last_round_may_be_a_part(method, replicas, parts, batches, data):
    require_same_rows(made(method, len(replicas), parts, replicas), batches, data)


def require_same_rows(endless: LoweredLoop, batches: int, data: st.DataObject) -> None:
    most = 0  # passes whose mini-batches are all there
    while endless.fed(most + 1) <= batches:
        most += 1
    passes = data.draw(st.integers(0, most))
    for slot in range(endless.shape.slots):
        found = [] if not passes else endless.fill(slot)
        for number in range(passes):
            found += endless.one(slot, number)
        assert found + endless.rest(slot, passes, batches) == plain(endless, batches, slot)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(METHODS), st.integers(1, 5), st.integers(1, 5), st.integers(1, 25))
def test_the_version_that_a_forward_names(method, stages, parts, batches):
    endless = made(method, stages, parts)
    rows = endless.loop.unroll(batches).rows
    for op, stage, number, version in zip(*(c.tolist() for c in rows.columns()[:4]), strict=True):
        if op == Op.F:
            assert endless.named(stage, number) == version


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["pipedream", "pipedream vertical", "2bw"]),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 20),
)
def test_so_it_is_with_replicas_and_each_runs_the_next_of_its_own(method, replicas, parts, batches):
    endless = made(method, len(replicas), parts, replicas)
    run = endless.loop.unroll(batches)
    for slot in range(endless.shape.slots):
        rows = run.rows.take(slice(int(run.starts[slot]), int(run.starts[slot + 1])))
        forwards = rows.take(np.flatnonzero(rows.op == Op.F))
        if not len(forwards):
            continue
        stage, numbers = int(forwards.stage[0]), forwards.microbatch.tolist()
        assert [endless.named(stage, number) for number in numbers] == forwards.version.tolist()
        assert endless.first_microbatch(stage, int(endless.shape.slot_replica[slot])) == numbers[0]
        assert [endless.next_microbatch(stage, number) for number in numbers[:-1]] == numbers[1:]


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_delays_are_those_of_the_paper_counted(parts):
    """PipeMare on 1F1B without a flush: (P - i)/N updates on average, i from 1, and none for the backward."""
    endless = made("pipemare", 4, parts)
    assert [endless.delay(stage) for stage in range(4)] == [(3 - stage) / parts for stage in range(4)]
    assert [endless.delay(stage, Op.B) for stage in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_ends_at_once(method):
    endless = made(method, 3, 1)
    for slot in range(3):
        assert endless.rest(slot, 0, 1) == plain(endless, 1, slot)
