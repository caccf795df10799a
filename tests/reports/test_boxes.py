"""Boxes, hops, curves and lanes are those of the timeline."""

from __future__ import annotations

import numpy as np
import pytest
from timelines import CASES, hand_made, plain, predicted

from penstock.core.action import COMPUTE, Op
from penstock.core.memory import MemoryKind
from penstock.reports.boxes import beside, busy, waits
from penstock.reports.curves import curves
from penstock.reports.hops import hops
from penstock.reports.trace import assign_lanes


def test_a_box_for_every_busy_action():
    line = CASES["overlapped pairs"]()
    boxes = busy(line)
    drawn = [[str(boxes.action(box)) for box in boxes.of_slot(slot)] for slot in range(line.schedule.shape.slots)]
    expected = [
        [str(a) for a in line.schedule.actions(slot) if a.op in (*COMPUTE, Op.UPDATE)]
        for slot in range(line.schedule.shape.slots)
    ]
    assert drawn == expected
    assert any("&" in word for words in drawn for word in words)


def test_boxes_fill_the_work():
    line = plain()
    boxes = busy(line)
    assert np.bincount(boxes.slot, boxes.end - boxes.start) == pytest.approx(line.work)


def test_times_count_from_the_first_moment():
    line, late = plain(), CASES["measured"]()
    assert busy(late).start.min() == pytest.approx(0, abs=0.02)
    assert busy(late).start == pytest.approx(busy(line).start, abs=0.02)


def test_reductions_and_waits():
    line = CASES["replicas that split"]()
    assert set(beside(line).op) == {Op.REDUCE}
    assert len(beside(line)) == 2
    late = waits(line)
    assert len(late)
    assert (late.end > late.start).all()


@pytest.mark.parametrize(
    "case", ["plain", "overlapped pairs", "replicas that split", "two chunks", "replicas in turns"]
)
def test_hops_lead_from_maker_to_user(case):
    line = CASES[case]()
    built, found = line.schedule, hops(line)
    slot = built.slot_of_rows()
    assert len(found) == np.isin(built.rows.op, (Op.SEND_F, Op.SEND_B)).sum() > 0
    assert (found.maker >= 0).all()
    assert (found.user >= 0).all()
    assert (slot[found.maker] == found.source).all()
    assert (slot[found.user] == found.target).all()
    assert (line.end[found.maker] <= found.start + 1e-9).all()
    assert (found.end <= line.start[found.user] + 1e-9).all()


def test_curves_reach_the_peak():
    for case in ("plain", "in bytes", "overlapped pairs", "weight gradients apart"):
        line = CASES[case]()
        found = curves(line)
        assert [curve.peak for curve in found] == pytest.approx(line.memory.peak(line.schedule).tolist())
        for curve in found:
            assert (np.diff(curve.times) >= 0).all()
            assert curve.thinned(0.5).peak == pytest.approx(curve.peak)


def test_a_curve_steps_when_actions_do():
    """One forward of A kept from 1 s on, given back by its backward at 4 s."""
    line = CASES["one stage"]()
    curve = curves(line)[0]
    assert curve.times.tolist() == [0, 0, 3, 3, 6, 6, 9]
    assert curve.total.tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_a_pair_holds_what_both_halves_need():
    """Its backward recomputes while the pair runs, not at its end."""
    line = predicted("dualpipe-v", 2, 6, {"overlap": True}, recompute=True)
    boxes, found = busy(line), curves(line)
    for box in np.flatnonzero(boxes.op == Op.FB):
        curve = found[boxes.slot[box]]
        at = np.searchsorted(curve.times, (boxes.start[box] + boxes.end[box]) / 2) - 1
        assert curve.levels[MemoryKind.RECOMPUTE][at] > 0


def test_thinned_curves_are_short():
    line = CASES["weight gradients apart"]()
    curve = curves(line)[0]
    assert len(curve.thinned(line.makespan / 4).times) <= 10 < len(curve.times)


def test_no_curves_where_nobody_counted():
    assert curves(CASES["measured"]()) == []


def test_lanes_never_hold_two_at_once():
    random = np.random.default_rng(0)
    slot = random.integers(0, 3, 200).astype(np.int32)
    start = random.uniform(0, 20, 200)
    end = start + random.uniform(0, 3, 200)
    lane = assign_lanes(slot, start, end)
    for place in set(zip(slot.tolist(), lane.tolist(), strict=True)):
        mine = np.flatnonzero((slot == place[0]) & (lane == place[1]))
        mine = mine[np.argsort(start[mine])]
        assert (end[mine][:-1] <= start[mine][1:]).all()
    assert assign_lanes(slot[:0], start[:0], end[:0]).tolist() == []


def test_lanes_are_as_few_as_can_be():
    slot = np.zeros(3, dtype=np.int32)
    assert assign_lanes(slot, np.array([0.0, 1.0, 2.0]), np.array([2.0, 3.0, 4.0])).tolist() == [0, 1, 0]


def test_clocks_that_disagree_with_the_list_are_sorted():
    line = hand_made(["0F0", "0F1"], [(1.0, 2.0), (0.0, 1.0)])
    assert [str(busy(line).action(box)) for box in range(2)] == ["0F1", "0F0"]
