"""A run of unknown length, taken pass by pass, is the run that unrolling would have made."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.action import Op
from penstock.core.lower import lower
from penstock.core.lowered_loop import ActionRow, LoweredLoop
from penstock.schedules.registry import loop

METHODS = ["pipedream", "pipedream vertical", "pipedream newest", "2bw", "pipemare"]


def made(method: str, stages: int, parts: int) -> LoweredLoop:
    name, _, how = method.partition(" ")
    options = {"vertical": {"vertical_sync": True}, "newest": {"stash": False}, "": {}}[how]
    return LoweredLoop(
        loop(name, stages=stages, microbatches=max(parts, stages) if name == "2bw" else parts, **options)
    )


def plain(endless: LoweredLoop, batches: int, slot: int) -> list[ActionRow]:
    full = lower(endless.loop.unroll(batches))
    columns = (column[full.starts[slot] : full.starts[slot + 1]].tolist() for column in full.rows.columns()[:5])
    return [ActionRow(Op(op), *rest) for op, *rest in zip(*columns, strict=True)]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(METHODS), st.integers(1, 5), st.integers(1, 6), st.integers(1, 30), st.data())
def test_passes_and_rest_are_the_unrolled_list(method, stages, parts, batches, data):
    endless = made(method, stages, parts)
    most = 0  # passes whose mini-batches are all there
    while endless.fed(most + 1) <= batches:
        most += 1
    passes = data.draw(st.integers(0, most))
    for slot in range(stages):
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
