"""Seconds of a mini-batch in the steady state: what another one adds to a run that is long enough."""

from __future__ import annotations

from math import lcm

import pytest

from penstock import from_csv, schedule, simulate

COSTS = {"forward": [1.0, 1.25, 0.75, 1.0], "input_grad": 0.875, "transfer": 0.125, "update": 0.25, "reduce": 0.5}
RUNS = {
    "pipedream": {"microbatches": 1},
    "pipedream of three": {"microbatches": 3},
    "pipedream in turns": {"microbatches": 1, "replicas": (2, 1, 3, 1)},
    "2bw": {"microbatches": 6},
    "pipemare": {"microbatches": 2},
}


@pytest.mark.parametrize("case", RUNS)
def test_the_pace_is_what_another_mini_batch_adds(case):
    asked = {"stages": 4, **RUNS[case]}
    more = 4 * lcm(*asked.get("replicas", (1,)))
    short, long = (
        simulate(schedule(case.split()[0], batches=batches, **asked), **COSTS) for batches in (60, 60 + more)
    )
    step = (long.makespan - short.makespan) / more
    for line, batches in ((short, 60), (long, 60 + more)):
        assert line.pace.seconds == pytest.approx(step)
        assert line.pace.fill_and_drain == pytest.approx(line.makespan - batches * step)
        assert line.pace.bubble == pytest.approx(1 - line.work.mean() / batches / step)


@pytest.mark.parametrize("case", RUNS)
def test_as_many_mini_batches_as_are_shown_unasked_are_steady(case):
    shown = simulate(schedule(case.split()[0], stages=4, **RUNS[case]))
    long = simulate(schedule(case.split()[0], stages=4, batches=96, **RUNS[case]))
    assert shown.pace.seconds == pytest.approx(long.pace.seconds)


def test_pipedream_beside_1f1b():
    """Eight micro-batches of 3 s on four equal ranks: 24 s of work; three ranks' 3 s to fill and drain."""
    step, run = (
        simulate(schedule("1f1b", stages=4, microbatches=8)),
        simulate(schedule("pipedream", stages=4, microbatches=8)),
    )
    assert (step.pace.seconds, step.pace.fill_and_drain) == (33.0, 0.0)
    assert step.pace.bubble == pytest.approx(step.bubble)
    assert (run.pace.seconds, run.pace.bubble, run.pace.fill_and_drain) == (24.0, 0.0, 9.0)


def test_several_flushed_mini_batches_take_the_same_each():
    one, three = (simulate(schedule("gpipe", stages=3, microbatches=4, batches=batches)) for batches in (1, 3))
    assert three.pace.seconds == pytest.approx(one.makespan)
    assert three.pace.fill_and_drain == pytest.approx(0.0)


def test_a_short_run_has_no_steady_state():
    assert simulate(schedule("pipedream", stages=4, batches=2)).pace is None
    assert simulate(from_csv("# law: stash\n# microbatches: 1\n# batches: 1\n0F0,0B0\n1F0,1B0\n")).pace is None
