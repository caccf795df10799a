"""The published tables of synchronous schedules, row by row, against the simulator.

Times per micro-batch and stage: TF, TI, TW, and TB = TI + TW. A is what one micro-batch keeps on one stage, AW the part
of it that stays until W. `idle` is the barrier view, `idle_own` the rank's own.
"""

from __future__ import annotations

import numpy as np
import pytest

from penstock import lower, schedule, simulate
from penstock.core.action import Op

COSTS = [(1.0, 1.0, 1.0), (1.0, 1.1, 0.7), (2.0, 2.5, 1.5)]  # TW at most TF and TI, as the tables ask
SIZES = [(2, 4), (3, 6), (4, 8), (4, 16), (8, 32), (5, 15)]  # m is a multiple of p and at least 2p
AW = 0.4

everywhere = pytest.mark.parametrize(("p", "m", "costs"), [(p, m, c) for p, m in SIZES for c in COSTS])


def timeline(name, p, m, costs, **options):
    forward, input_grad, weight_grad = costs
    plan = schedule(name, stages=p, microbatches=m, **options)
    return simulate(plan, forward=forward, input_grad=input_grad, weight_grad=weight_grad, weight_grad_memory=AW)


def exactly(value):
    return pytest.approx(value, abs=1e-9)


def sends(line):
    return int(np.isin(line.schedule.rows.op, [Op.SEND_F, Op.SEND_B]).sum())


@everywhere
def test_naive_keeps_one_rank_busy_at_a_time(p, m, costs):
    line = timeline("naive", p, m, costs)
    busy = (line.schedule.rows.op <= Op.FB) & (line.end > line.start)
    order = np.argsort(line.start[busy], kind="stable")
    assert np.all(line.end[busy][order][:-1] <= line.start[busy][order][1:] + 1e-9)
    assert line.makespan == exactly(line.work.sum())
    assert line.peak_activations.tolist() == [1.0] * p


@everywhere
def test_gpipe_idle_and_memory(p, m, costs):
    line = timeline("gpipe", p, m, costs)
    assert line.idle.tolist() == exactly([(p - 1) * sum(costs)] * p)
    assert line.bubble == exactly((p - 1) / (m + p - 1))
    assert line.peak_activations.tolist() == exactly([m] * p)
    assert sends(line) == 2 * (p - 1) * m


@everywhere
def test_gpipe_with_recompute_keeps_inputs_and_one_full_set(p, m, costs):
    plan = schedule("gpipe", stages=p, microbatches=m)
    line = simulate(plan, forward=costs[0], recompute=True, recompute_memory=0.1)
    assert line.peak_activations.tolist() == exactly([m * 0.1 + 0.9] * p)


@everywhere
@pytest.mark.parametrize("name", ["1f1b", "dapple"])
def test_1f1b_and_dapple_pa_have_gpipes_idle_and_less_memory(name, p, m, costs):
    line = timeline(name, p, m, costs)
    assert line.idle.tolist() == exactly([(p - 1) * sum(costs)] * p)
    assert line.peak_activations.tolist() == exactly([min(m, p - r) for r in range(p)])
    assert line.weight_versions.tolist() == [1] * p
    assert sends(line) == 2 * (p - 1) * m


@everywhere
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved_divides_the_bubble_by_its_chunks(v, p, m, costs):
    line = timeline("interleaved", p, m, costs, chunks=v)
    assert line.idle.tolist() == exactly([(p - 1) * sum(costs) / v] * p)
    assert line.peak_activations[0] == exactly(p + (p - 1) / v)
    assert sends(line) == 2 * (p * v - 1) * m  # v times 2(p-1)m, and the steps from the last rank to the first


@everywhere
def test_zb_h1(p, m, costs):
    forward, input_grad, weight_grad = costs
    line = timeline("zb-h1", p, m, costs)
    assert line.idle.tolist() == exactly([(p - 1) * (forward + input_grad - weight_grad)] * p)
    assert line.peak_activations.tolist() == exactly([(p - r) + r * AW for r in range(p)])
    assert sends(line) == 2 * (p - 1) * m


@everywhere
def test_zb_h2(p, m, costs):
    forward, input_grad, weight_grad = costs
    line = timeline("zb-h2", p, m, costs)
    assert line.idle_own.max() == exactly((p - 1) * (forward + input_grad - 2 * weight_grad))
    assert line.peak_activations.tolist() == exactly([(2 * p - 2 * r - 1) + 2 * r * AW for r in range(p)])


@everywhere
def test_zb_v(p, m, costs):
    line = timeline("zb-v", p, m, costs)
    if len(set(costs)) == 1:
        assert line.idle_own.tolist() == exactly([0.0] * p)
    assert line.peak_activations.tolist() == exactly([p] * p)
    assert line.weight_versions.tolist() == [1] * p
    assert sends(line) == 2 * 2 * (p - 1) * m


@everywhere
def test_dualpipe_v_overlapped(p, m, costs):
    forward, input_grad, weight_grad = (cost / 2 for cost in costs)  # chunk times
    backward = input_grad + weight_grad
    line = timeline("dualpipe-v", p, m, costs, overlap=True)
    assert line.idle[0] == exactly((p - 1) * (forward + backward + backward - 3 * weight_grad))
    assert line.peak_activations.tolist() == exactly([(2 * p + 1) / 2] * p)
    assert sends(line) == 2 * 2 * (p - 1) * m


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_the_formulas_hold_at_the_edges_of_their_domains(p, costs):
    forward, input_grad, weight_grad = costs
    h1 = timeline("zb-h1", p, p, costs)  # m = p
    assert h1.idle.tolist() == exactly([(p - 1) * (forward + input_grad - weight_grad)] * p)
    h2 = timeline("zb-h2", p, 2 * p - 1, costs)
    assert h2.idle_own.max() == exactly((p - 1) * (forward + input_grad - 2 * weight_grad))
    ring = timeline("interleaved", p, p, costs, chunks=2)  # m = p
    assert ring.idle.tolist() == exactly([(p - 1) * sum(costs) / 2] * p)
    for m in range(1, p):  # fewer micro-batches than ranks
        few = timeline("1f1b", p, m, costs)
        assert few.idle.tolist() == exactly([(p - 1) * sum(costs)] * p)
        assert few.peak_activations.tolist() == exactly([min(m, p - r) for r in range(p)])
    pairs = timeline("dualpipe-v", p, 2 * p, costs, overlap=True)
    assert pairs.peak_activations.tolist() == exactly([(2 * p + 1) / 2] * p)


TABLE = {
    (1.0, 1.0, 1.0): (21, 10.5, 5.25, 7, 7, 3.5, 3.5),
    (1.0, 1.1, 0.7): (19.6, 9.8, 4.9, 9.8, 7.0, 3.85, 4.9),
}
COLUMNS = [("1f1b", {}), ("interleaved", {"chunks": 2}), ("interleaved", {"chunks": 4})]
COLUMNS += [("zb-h1", {}), ("zb-h2", {}), ("zb-v", {}), ("dualpipe-v", {})]


@pytest.mark.parametrize("costs", TABLE)
@pytest.mark.parametrize("column", range(len(COLUMNS)))
def test_idle_with_a_barrier_at_p8_m32(costs, column):
    name, options = COLUMNS[column]
    assert timeline(name, 8, 32, costs, **options).idle.tolist() == exactly([TABLE[costs][column]] * 8)


def test_dualpipe_v_at_p8_with_atomic_pairs():
    assert timeline("dualpipe-v", 8, 32, (1.0, 1.0, 1.0), overlap=True).idle[0] == exactly(7.0)


@pytest.mark.parametrize(
    ("stages", "transfer", "pa", "pb"), [(2, 0.1, 102.2, 99.2), (2, 1, 131, 101), (4, 0.5, 131, 108), (4, 1, 157, 111)]
)
def test_dapple_makespans_with_transfers(stages, transfer, pa, pb):
    for policy, makespan in (("pa", pa), ("pb", pb)):
        plan = schedule("dapple", stages=stages, microbatches=32, policy=policy)
        assert simulate(plan, transfer=transfer).makespan == exactly(makespan)


@pytest.mark.parametrize(
    ("forward", "backward", "link", "m", "reduce", "pa", "pb"),
    [
        ([1, 1], [2, 2], [0], 4, [0, 0], 15, 15),
        ([1, 1], [2, 2], [0.5], 8, [3, 3], 34, 31),
        ([2, 1], [4, 2], [0.1], 6, [5, 1], 42.2, 41),
        ([1, 1.5, 1], [2, 3, 2], [0.2, 0.2], 8, [4, 4, 10], 46.3, 43.8),
    ],
)
def test_dapple_makespans_with_reductions(forward, backward, link, m, reduce, pa, pb):
    # Two replicas each take half of the rows, so the table's costs of one replica are half of a whole micro-batch's.
    whole = {"forward": forward, "input_grad": backward, "transfer": link}
    whole = {name: 2 * np.array(values, dtype=float) for name, values in whole.items()}
    for policy, makespan in (("pa", pa), ("pb", pb)):
        plan = schedule("dapple", stages=len(forward), microbatches=m, policy=policy, replicas=2)
        assert simulate(plan, **whole, weight_grad=0, reduce=reduce).makespan == exactly(makespan)


def test_lowered_and_plain_schedules_give_the_same_timeline():
    plan = schedule("zb-v", stages=3, microbatches=6)
    assert np.array_equal(simulate(plan, transfer=0.3).end, simulate(lower(plan), transfer=0.3).end)
