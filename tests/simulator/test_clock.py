"""The clock against an independent plain loop, and what it says of links, reductions and memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import (
    Cluster,
    Device,
    InputError,
    Layer,
    Level,
    Op,
    Plan,
    Profile,
    ScheduleError,
    StagePlan,
    Timeline,
    from_csv,
    schedule,
    simulate,
)
from penstock.core import jit
from penstock.core.cost import flat_costs, plan_costs
from penstock.core.memory import MemoryKind
from penstock.simulator.simulate import simulate_costs

NAMES = ["naive", "gpipe", "1f1b", "dapple", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "2bw", "pipemare"]


def plain_clock(line, seconds, transfer, reduce):
    """Start and end by relaxation: repeat all rules until nothing moves. Slow, and shares nothing with the clock."""
    full = line.schedule
    shape, slots = full.shape, []
    for slot in range(shape.slots):
        slots.append(list(full.actions(slot)))
    times = {}
    changed = True
    while changed:
        changed = False
        for slot, actions in enumerate(slots):
            now, reducing, link = 0.0, 0.0, {}
            for action in actions:
                mine = (int(shape.slot_rank[slot]), int(shape.slot_replica[slot]))
                if action.op in (Op.SEND_F, Op.SEND_B):
                    there = shape.slot(action.peer, action.replica)
                    begin = max(now, link.get(there, 0.0)) if transfer else now
                    link[there] = end = begin + transfer
                    key = ("sent", action.op, action.stage, action.peer, mine[1], action.replica, action.microbatch)
                elif action.op in (Op.RECV_F, Op.RECV_B):
                    kind = Op.SEND_F if action.op is Op.RECV_F else Op.SEND_B
                    sent = ("sent", kind, action.peer, action.stage, action.replica, mine[1], action.microbatch)
                    begin, end = now, max(now, times.get(sent, (0.0, 0.0))[1])
                    now, key = end, ("received", slot, str(action))
                elif action.op is Op.REDUCE:
                    came = ("in", action.stage, action.version, mine[1])
                    asked = max(now, reducing)  # a slot reduces one stage after the other
                    if times.get(came) != asked:
                        times[came], changed = asked, True
                    replicas = range(shape.replicas[mine[0]])
                    begin = max(times.get(("in", action.stage, action.version, r), 0.0) for r in replicas)
                    reducing = end = begin + reduce
                    key = ("reduced", slot, action.stage, action.version)
                elif action.op is Op.UPDATE:
                    done = times.get(("reduced", slot, action.stage, action.version), (0.0, 0.0))[1]
                    begin = end = now = max(now, done)
                    key = ("updated", slot, action.stage, action.version)
                else:
                    share = 1.0 if shape.turns else 1.0 / shape.replicas[mine[0]]
                    begin = now
                    now = end = begin + share * (
                        seconds[action.op] + (seconds[Op.B] if action.joined is not None else 0.0)
                    )
                    key = ("ran", slot, str(action))
                if times.get(key) != (begin, end):
                    times[key], changed = (begin, end), True
    return max(value[1] for value in times.values() if isinstance(value, tuple))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([0.0, 0.25, 2.0]),
    st.sampled_from([0.0, 1.5]),
    st.booleans(),
)
def test_the_clock_agrees_with_relaxation(name, p, times_m, transfer, reduce, replicated):
    m = 2 * p * times_m
    plan = schedule(name, stages=p, microbatches=m, replicas=2 if replicated and transfer == 0 else 1)
    line = simulate(plan, forward=1, input_grad=1.5, weight_grad=0.5, transfer=transfer, reduce=reduce)
    chunk = plan.shape.chunks
    seconds = {Op.F: 1 / chunk, Op.FB: 1 / chunk, Op.B: 2 / chunk, Op.I: 1.5 / chunk, Op.W: 0.5 / chunk}
    assert line.makespan == pytest.approx(plain_clock(line, seconds, transfer, reduce / chunk))


@pytest.mark.parametrize("name", [*NAMES, "pipedream"])
def test_compiled_and_plain_kernels_give_the_same_bits(name, monkeypatch):
    arguments = {"stages": 4, "batches": 2, "replicas": (2, 1, 3, 2)}
    arguments |= {} if name == "pipedream" else {"microbatches": 8}
    costs = {"forward": [1, 0.3, 0.7, 1.1], "input_grad": 0.9, "transfer": 0.13, "reduce": 0.2, "update": 0.1}
    plain = simulate(schedule(name, **arguments), **costs)
    monkeypatch.setattr(jit, "COMPILE_FROM", 0)
    compiled = simulate(schedule(name, **arguments), **costs)
    assert np.array_equal(plain.start, compiled.start)
    assert np.array_equal(plain.end, compiled.end)
    assert plain.schedule == compiled.schedule


def two_hosts(shared, latency=0.0):
    """Two hosts of two devices: fast inside, one byte a second between."""
    return Cluster.uniform(
        (Level("host", 2, 1e9), Level("network", 2, 1.0, latency, shared=shared)), Device(memory=100)
    )


def four_stages(output=2.0):
    layers = tuple(
        Layer(str(i), 1.0, 1.0, 1.0, output, kept_bytes=8.0, kept_until_weight_bytes=4.0, parameter_bytes=6.0)
        for i in range(4)
    )
    return Profile(layers)


def placed(*devices, name="gpipe", m=2):
    """One layer a stage on the devices given."""
    stages = tuple(StagePlan(i, i) for i in range(len(devices)))
    return Plan(stages, tuple(range(len(devices))), tuple(((d,),) for d in devices), name, m)


def test_a_transfer_takes_bytes_over_bandwidth_and_latency():
    plan = placed(0, 2, name="naive", m=1)
    profile = Profile(four_stages().layers[:2])
    built = schedule("naive", stages=2, microbatches=1)
    line = simulate(built, profile=profile, plan=plan, cluster=two_hosts(False, latency=0.5))
    assert line.makespan == pytest.approx(1 + 2.5 + 1 + 2 + 2.5 + 2)


def test_a_shared_uplink_makes_two_pipelines_wait_for_each_other():
    # Stages 0 and 1 sit on host 0 and both send to host 1: over one uplink, or over links of their own.
    built = schedule("gpipe", stages=4, microbatches=4, edges=[(0, 2), (1, 3)])
    profile = Profile(four_stages().layers, ((0, 2), (1, 3)))
    times = {}
    for shared in (False, True):
        line = simulate(built, profile=profile, plan=placed(0, 1, 2, 3, m=4), cluster=two_hosts(shared))
        sends = line.schedule.rows.op == Op.SEND_F
        spans = sorted(zip(line.start[sends], line.end[sends], strict=True))
        overlap = any(b[0] < a[1] - 1e-9 for a, b in pairwise(spans))
        times[shared] = line.makespan
        assert overlap is not shared
        assert sum(end - start for start, end in spans) == pytest.approx(8 * 2.0)
    assert times[True] > times[False]


def test_a_shared_link_serves_in_the_order_of_asking_and_repeats_exactly():
    built = schedule("gpipe", stages=4, microbatches=6, edges=[(0, 2), (1, 3), (1, 2)])
    profile = Profile(four_stages().layers, ((0, 2), (1, 3), (1, 2)))
    lines = [simulate(built, profile=profile, plan=placed(0, 1, 2, 3, m=6), cluster=two_hosts(True)) for _ in range(2)]
    assert np.array_equal(lines[0].end, lines[1].end)
    line = lines[0]
    rows = np.flatnonzero(line.schedule.rows.op == Op.SEND_F)
    # A send is asked for when the compute right before it ends, and served in that order.
    before = [row - 1 if line.schedule.rows.op[row - 1] <= Op.FB else row - 2 for row in rows.tolist()]
    asked, slot = line.end[before], line.schedule.slot_of_rows()[rows]
    served = np.lexsort((rows, slot, asked))
    assert np.all(np.diff(line.start[rows][served]) >= -1e-9)


def test_a_slow_device_takes_longer_and_a_fast_one_less():
    profile = Profile(four_stages(0.0).layers[:2])
    cluster = Cluster((Device(speed=2.0), Device(speed=0.5)), (Level("host", 2, 1e9),))
    line = simulate(
        schedule("naive", stages=2, microbatches=1), profile=profile, plan=placed(0, 1, m=1), cluster=cluster
    )
    assert line.work.tolist() == pytest.approx([1.5, 6.0])


def test_reductions_overlap_compute_and_only_the_update_waits():
    built = schedule("gpipe", stages=2, microbatches=2, replicas=2)
    bare, reduced = (simulate(built, forward=2, input_grad=2, weight_grad=2, reduce=r) for r in (0.0, 1.5))
    assert reduced.makespan == pytest.approx(bare.makespan + 1.5)  # rank 0 ends last; rank 1's is hidden
    rank1 = (reduced.schedule.rows.op == Op.REDUCE) & (reduced.schedule.slot_of_rows() >= 2)
    assert reduced.end[rank1].max() < reduced.makespan


def test_memory_by_kind_follows_the_plan():
    profile, plan = four_stages(), placed(0, 1, 2, 3, name="zb-h1", m=4)
    built = schedule("zb-h1", stages=4, microbatches=4)
    line = simulate(built, profile=profile, plan=plan, cluster=two_hosts(False))
    memory = line.memory
    assert memory.standing[MemoryKind.WEIGHTS].tolist() == [6.0] * 4
    assert memory.peak(line.schedule, [MemoryKind.GRADIENTS]).tolist() == [6.0] * 4
    assert memory.peak(line.schedule, [MemoryKind.ACTIVATIONS]).tolist() == [4 * 8.0, 3 * 8.0, 2 * 8.0, 8.0]
    assert line.peak_activations.tolist() == [(4 - r) * 8.0 + r * 4.0 for r in range(4)]
    for kind, level in memory.ended.items():
        last = line.schedule.starts[1:] - 1
        assert level[last].tolist() == [0.0] * 4, kind  # everything is given back at the end


def test_memory_of_weight_versions():
    profile, plan = four_stages(), placed(0, 1, 2, 3, name="pipedream", m=1)
    built = schedule("pipedream", stages=4, batches=12)
    line = simulate(built, profile=profile, plan=plan, cluster=two_hosts(False))
    assert line.weight_versions.tolist() == [4, 3, 2, 1]
    assert line.memory.peak(line.schedule, [MemoryKind.VERSIONS]).tolist() == [18.0, 12.0, 6.0, 0.0]
    assert line.memory.peak(line.schedule, [MemoryKind.WEIGHTS, MemoryKind.VERSIONS]).tolist() == [
        24.0,
        18.0,
        12.0,
        6.0,
    ]


def test_recompute_costs_a_forward_and_keeps_inputs():
    built = schedule("1f1b", stages=2, microbatches=4)
    bare, again = simulate(built), simulate(built, recompute=True, recompute_memory=0.25)
    assert again.work.tolist() == [value + 4 for value in bare.work.tolist()]
    assert again.peak_activations.tolist() == [2 * 0.25 + 0.75, 1.0]
    assert again.memory.peak(again.schedule, [MemoryKind.RECOMPUTE]).tolist() == [0.75, 0.75]


def test_utilisation_is_the_mean_share_of_busy_ranks():
    line = simulate(schedule("gpipe", stages=2, microbatches=1))
    assert line.utilisation == pytest.approx(0.5)
    assert line.bubble == pytest.approx(0.5)


@pytest.mark.parametrize("given_", [{"profile": four_stages()}, {"plan": placed(0, 1), "cluster": two_hosts(False)}])
def test_profile_plan_and_cluster_come_together(given_):
    with pytest.raises(InputError, match="profile, plan and cluster together, or numbers alone"):
        simulate(schedule("1f1b", stages=2, microbatches=2), **given_)


def test_a_plan_of_another_profile_is_refused():
    built = schedule("gpipe", stages=2, microbatches=2)
    with pytest.raises(InputError, match="a plan of the profile's 4 layers, but got 2"):
        plan_costs(built.shape, four_stages(), placed(0, 1), two_hosts(False))


def test_costs_can_be_handed_in_directly():
    built = schedule("1f1b", stages=2, microbatches=2)
    costs = flat_costs(built.shape, forward=[1, 2])
    assert simulate_costs(built, costs).makespan == simulate(built, forward=[1, 2]).makespan


def test_a_deadlock_is_drawn_with_who_waits_for_whom_and_never_timed():
    with pytest.raises(ScheduleError, match=r"deadlock: waits for rank 1") as caught:
        simulate(from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"))
    assert len(caught.value.faults) == 2


def test_an_unsound_schedule_is_never_timed():
    with pytest.raises(ScheduleError, match="0B1 is missing"):
        simulate(from_csv("0F0,0F1,0B0\n"))


def test_a_measured_timeline_counts_from_its_own_first_start():
    line = simulate(schedule("gpipe", stages=2, microbatches=2))
    later = Timeline(line.schedule, line.start + 100.0, line.end + 100.0, measured=True)
    assert later.makespan == line.makespan
    assert later.bubble == line.bubble
    assert later.idle.tolist() == line.idle.tolist()


def test_updates_between_mini_batches_are_work_in_both_views():
    line = simulate(schedule("pipedream", stages=1, batches=4), update=1.0)
    assert line.idle.tolist() == [0.0]
    assert line.idle_own.tolist() == [0.0]
    line = simulate(schedule("gpipe", stages=1, microbatches=2, batches=3), update=1.0)
    assert (line.idle.tolist(), line.idle_own.tolist()) == ([0.0], [0.0])


def test_both_ends_of_a_shared_uplink_are_taken():
    # Stages 0 and 1 are on different hosts and both send to host 2, which has one way in.
    cluster = Cluster.uniform((Level("host", 1, 1e9), Level("network", 3, 1.0, shared=True)))
    layers = four_stages().layers[:3]
    built = schedule("gpipe", stages=3, microbatches=3, edges=[(0, 2), (1, 2)])
    line = simulate(built, profile=Profile(layers, ((0, 2), (1, 2))), plan=placed(0, 1, 2, m=3), cluster=cluster)
    sends = line.schedule.rows.op == Op.SEND_F
    spans = sorted(zip(line.start[sends], line.end[sends], strict=True))
    assert len(spans) == 6
    assert all(b[0] >= a[1] - 1e-9 for a, b in pairwise(spans))


def replicated(level_one, reduce_bandwidth=None):
    """One stage of two layers on two replicas: on one host, or on two."""
    layers = tuple(
        Layer(str(i), 1, 1, 1, parameter_bytes=30.0, buffer_bytes=5.0, optimizer_bytes=60.0) for i in range(2)
    )
    levels = (Level("host", 2, 10.0, reduce_bandwidth=reduce_bandwidth), Level("network", 2, 2.0, latency=0.25))
    plan = Plan((StagePlan(0, 1),), (0,), (((0,), (level_one,)),), "gpipe", 1)
    built = schedule("gpipe", stages=1, microbatches=1, replicas=2)
    return simulate(built, profile=Profile(layers), plan=plan, cluster=Cluster.uniform(levels))


def test_a_plans_reduction_takes_the_rings_time_at_the_level_that_joins_the_replicas():
    def seconds(line):
        rows = line.schedule.rows.op == Op.REDUCE
        return float((line.end - line.start)[rows].max())

    assert seconds(replicated(1)) == pytest.approx(2 * 1 / 2 * 60 / 10)
    assert seconds(replicated(1, reduce_bandwidth=20.0)) == pytest.approx(2 * 1 / 2 * 60 / 20)
    assert seconds(replicated(2)) == pytest.approx(2 * 1 / 2 * 60 / 2 + 2 * 0.25)


def test_memory_counts_buffers_and_optimizer_state():
    memory = replicated(1).memory
    assert memory.standing[MemoryKind.WEIGHTS].tolist() == [70.0, 70.0]
    assert memory.standing[MemoryKind.OPTIMIZER].tolist() == [120.0, 120.0]


def test_a_tensor_group_is_as_slow_as_its_slowest_device():
    cluster = Cluster((Device(speed=2.0), Device(speed=0.5)), (Level("host", 2, 1e9),))
    plan = Plan((StagePlan(0, 0),), (0,), (((0, 1),),), "naive", 1)
    line = simulate(
        schedule("naive", stages=1, microbatches=1),
        profile=Profile(four_stages().layers[:1]),
        plan=plan,
        cluster=cluster,
    )
    assert line.work.tolist() == [6.0]


@pytest.mark.parametrize(
    ("plan", "edges", "said"),
    [
        (placed(0, 1, 2, m=2), (), "as in the schedule"),
        (placed(0, 7), (), r"devices 0 to 3 of the cluster, but got \[7\]"),
    ],
)
def test_a_plan_that_does_not_fit_schedule_or_cluster_is_refused(plan, edges, said):
    layers = four_stages().layers[: len(plan.stages)]
    with pytest.raises(InputError, match=said):
        simulate(
            schedule("gpipe", stages=2, microbatches=2), profile=Profile(layers), plan=plan, cluster=two_hosts(False)
        )


def test_traffic_that_no_edge_carries_is_refused_and_not_lost():
    profile = Profile(four_stages().layers[:3], ((0, 2), (1, 2)))
    arguments = {"profile": profile, "plan": placed(0, 1, 2), "cluster": two_hosts(False)}
    with pytest.raises(InputError, match=r"no edge for \[\(0, 2\)\]"):
        simulate(schedule("gpipe", stages=3, microbatches=2), **arguments)
    assert (
        simulate(schedule("gpipe", stages=3, microbatches=2, edges=[(0, 1), (0, 2), (1, 2)]), **arguments).makespan > 0
    )


def test_one_way_in_serves_two_senders_in_the_order_of_asking():
    # Both send to host 2; stage 1 asks at 1, 2, 3 and stage 0 at 1.5, 3, 4.5.
    cluster = Cluster.uniform((Level("host", 1, 1e9), Level("network", 3, 10.0, shared=True)))
    layers = tuple(Layer(str(i), forward, 1, 1, output_bytes=2.0) for i, forward in enumerate((1.5, 1.0, 1.0)))
    built = schedule("gpipe", stages=3, microbatches=3, edges=[(0, 2), (1, 2)])
    line = simulate(built, profile=Profile(layers, ((0, 2), (1, 2))), plan=placed(0, 1, 2, m=3), cluster=cluster)
    sends = line.schedule.rows.op == Op.SEND_F
    starts = sorted(zip(line.start[sends].tolist(), line.schedule.slot_of_rows()[sends].tolist(), strict=True))
    assert starts == [
        (pytest.approx(begin), slot) for begin, slot in ((1, 1), (1.5, 0), (2, 1), (3, 0), (3.2, 1), (4.5, 0))
    ]
