"""Stages that offload: seconds and bytes, each number by hand.

Two stages of one layer: F 2, I 3, W 1; 8 bytes kept, 3 of them until W; between device and host 2 bytes a second, so a
copy takes 4 seconds one way: an F of stage 0 then takes 4, its B still 4 and its I 4.
"""

from __future__ import annotations

import numpy as np
import pytest

from penstock import Cluster, Device, InputError, Layer, Level, Plan, Profile, StagePlan, breakdown, schedule, simulate
from penstock.core.action import Op
from penstock.core.cost import plan_costs
from penstock.core.memory import MemoryKind

LAYER = {"output_bytes": 5, "kept_bytes": 8, "kept_until_weight_bytes": 3, "parameter_bytes": 7}
PROFILE = Profile(tuple(Layer(name, 2, 3, 1, **LAYER) for name in "ab"))
LINK = (Level("link", 2, float("inf")),)


def plan_of(name, microbatches, *stages, devices=(((0,),), ((1,),))):
    return Plan(stages or (StagePlan(0, 0, offload=True), StagePlan(1, 1)), (0, 1), devices, name, microbatches)


def run(name, microbatches, *stages, host=2.0, **device):
    plan = plan_of(name, microbatches, *stages)
    cluster = Cluster.uniform(LINK, Device("d", host_bandwidth=host, **device))
    return simulate(schedule(name, stages=2, microbatches=microbatches), profile=PROFILE, plan=plan, cluster=cluster)


def activations(line, kind=MemoryKind.ACTIVATIONS):
    return line.memory.peak(line.schedule, (kind,)).tolist()


def test_a_forward_and_a_backward_last_as_long_as_their_copies():
    """Rank 0: F 0-4, 4-8; B 10-14 and 16-20. Rank 1: F 4-6, B 6-10; F 10-12 (the input is there at 8), B 12-16."""
    assert run("1f1b", 2).makespan == 20
    # Without: F 0-2, 2-4, B 8-12 and 14-18; rank 1: F 2-4, B 4-8, F 8-10, B 10-14.
    assert run("1f1b", 2, StagePlan(0, 0), StagePlan(1, 1)).makespan == 18
    # A way twice as wide: 2 seconds a copy hide behind everything.
    assert run("1f1b", 2, host=4.0).makespan == 18


def test_a_full_backward_hides_what_an_input_gradient_does_not():
    costs = plan_costs(
        schedule("1f1b", stages=2, microbatches=1).shape,
        PROFILE,
        plan_of("1f1b", 1),
        Cluster.uniform(LINK, Device("d", host_bandwidth=2.0)),
    )
    assert [costs.seconds(op).tolist() for op in (Op.F, Op.B, Op.I, Op.W)] == [[4, 2], [4, 4], [4, 3], [1, 1]]
    assert costs.host_copy.tolist() == [4, 0]
    assert costs.offloads.tolist() == [True, False]


def test_what_is_kept_leaves_after_the_forward_and_comes_back_for_the_backward():
    """GPipe with 4 micro-batches: 4 x 8 bytes; offloaded 8 for the one that runs and 8 for a copy in flight."""
    offloaded, plain = run("gpipe", 4), run("gpipe", 4, StagePlan(0, 0), StagePlan(1, 1))
    assert activations(plain) == [32, 32]
    assert activations(offloaded) == [16, 32]
    begun, ended = (part[MemoryKind.ACTIVATIONS] for part in (offloaded.memory.begun, offloaded.memory.ended))
    mine = (offloaded.schedule.slot_of_rows() == 0) & (offloaded.schedule.rows.op <= Op.W)
    assert begun[mine].tolist() == [16] * 8
    assert ended[mine].tolist() == [8] * 7 + [0]


def test_what_an_input_gradient_leaves_stays_until_the_weight_gradient():
    """ZB-H1's rank 1, two stages: F I F I W W: after both I, 2 x 3 bytes are held whether offloaded or not."""
    stages = (StagePlan(0, 0), StagePlan(1, 1, offload=True))
    assert activations(run("zb-h1", 4, *stages), MemoryKind.HELD) == activations(run("zb-h1", 4), MemoryKind.HELD)
    assert activations(run("zb-h1", 4, *stages))[1] == 16


def test_a_stage_that_recomputes_moves_its_inputs_alone():
    """Stage 1 keeps the 5 bytes that come in: 2.5 seconds. Its B is F + I + W = 6, its F 2.5; RECOMPUTE adds 8 - 5."""
    line = run("gpipe", 3, StagePlan(0, 0), StagePlan(1, 1, recompute=True, offload=True))
    assert line.costs.host_copy.tolist() == [0, 2.5]
    assert [line.costs.seconds(op)[1] for op in (Op.F, Op.B, Op.I)] == [2.5, 6, 5]
    assert activations(line)[1] == 10
    assert activations(line, MemoryKind.RECOMPUTE)[1] == 3


def test_the_speed_of_a_device_is_not_that_of_its_way_to_the_host():
    """Twice as fast: F 1, but the copy takes 4 as before."""
    line = run("1f1b", 1, speed=2.0)
    rows = line.schedule.slot_of_rows() == 0
    spent = (line.end - line.start)[rows & (line.schedule.rows.op == Op.F)]
    assert spent.tolist() == [4]


def test_replicas_share_the_copy_and_the_slowest_way_counts():
    shape = schedule("1f1b", stages=2, microbatches=2, replicas=(2, 1)).shape
    kinds = (Device("a", host_bandwidth=2.0), Device("b", host_bandwidth=1.0), Device("c"))
    plan = plan_of("1f1b", 2, devices=(((0,), (1,)), ((2,),)))
    line = simulate(
        schedule("1f1b", stages=2, microbatches=2, replicas=(2, 1)),
        profile=PROFILE,
        plan=plan,
        cluster=Cluster(kinds, (Level("link", 3, float("inf")),)),
    )
    assert plan_costs(shape, PROFILE, plan, Cluster(kinds, (Level("l", 3, 1.0),))).host_copy.tolist() == [8, 0]
    forwards = (line.schedule.rows.op == Op.F) & (line.schedule.slot_of_rows() < 2)
    assert set((line.end - line.start)[forwards].tolist()) == {4}  # half of the rows each
    assert activations(line) == [8, 8, 8]  # two halves of 8: the one that runs and the one in flight


def test_the_breakdown_names_what_offloading_adds():
    line = run("1f1b", 2)
    parts = breakdown(line.schedule, line.costs)
    assert (parts.offload, parts.makespan) == (2, 20)
    assert breakdown(line.schedule, run("1f1b", 2, host=4.0).costs).offload == 0


def test_a_device_without_a_way_to_the_host():
    with pytest.raises(InputError, match=r"a host_bandwidth of device kind 'd', on which stage 0 offloads .* got none"):
        run("1f1b", 2, host=0.0)


def test_auto_does_not_plan_for_offload():
    costs = run("1f1b", 2).costs
    with pytest.raises(InputError, match="costs without offload for auto"):
        schedule("auto", stages=2, microbatches=2, costs=costs)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "naive"])
def test_nothing_stays_and_never_more_than_without(name):
    """Two in use or in flight beat more than two kept; at the end everything is gone."""
    plain = run(name, 6, StagePlan(0, 0), StagePlan(1, 1))
    line = run(name, 6)
    last = line.schedule.starts[1:] - 1
    assert np.allclose([line.memory.ended[kind][last] for kind in (MemoryKind.ACTIVATIONS, MemoryKind.HELD)], 0)
    assert activations(line)[0] == 16
    assert activations(line)[1] == activations(plain)[1]
