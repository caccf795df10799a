"""What is made of the readings of all ranks: timelines, stage costs, and a prediction that forgets no second.

The readings are those of a pipeline whose costs are known: played here, by a loop of its own, row after row.

    rank 0  F0 s F1 s ........ r B0 r B1 U      s: a send takes its rank SEND seconds
    rank 1  ... r F0 B0 s r F1 B1 s ...  U      r: a receive takes HANDLING when its message is there, LATENCY after the
                                                   send; all wait for the last rank, then update
"""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.action import Op
from penstock.core.cost import Footprint
from penstock.core.lower import lower
from penstock.core.match import match
from penstock.core.schedule import Schedule
from penstock.errors import InputError
from penstock.schedules.registry import schedule
from penstock.training.measurement.gather import PARTS, _footprint, _seconds
from penstock.training.measurement.measured import Measured
from penstock.training.measurement.row_costs import Timed

SEND, HANDLING, LATENCY, UPDATE = 0.02, 0.03, 0.25, 0.7
SECONDS = {Op.F: 1.0, Op.B: 2.1, Op.I: 1.2, Op.W: 0.9, Op.SEND_F: SEND, Op.SEND_B: SEND}
RECEIVES = (Op.RECV_F, Op.RECV_B)
METHODS = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "interleaved": 2, "zb-v": 2}


def lowered(name: str = "1f1b", ranks: int = 3, microbatches: int = 6) -> Schedule:
    chunks = {} if METHODS.get(name, 1) == 1 else {"chunks": 2}
    return lower(schedule(name, stages=ranks, microbatches=microbatches, **chunks))


def readings(built: Schedule, slower: float = 1.0, begin: float = 5.0) -> list[list[float]]:
    """Of every rank: begin, the end of every row, begin and end of the update. Stage s is slower by s tenths."""
    pairs, rows = match(built), built.rows
    sender = {int(r): int(s) for s, r in zip(pairs.sends.ravel(), pairs.receives.ravel(), strict=True) if r >= 0}
    end = np.full(len(built), np.nan)
    now = [begin] * built.shape.slots
    at = built.starts[:-1].copy()
    moved = True
    while moved:
        moved = False
        for slot in range(built.shape.slots):
            while at[slot] < built.starts[slot + 1] and rows.op[at[slot]] != Op.UPDATE:
                row = int(at[slot])
                op = Op(int(rows.op[row]))
                if op in RECEIVES:
                    if np.isnan(end[sender[row]]):
                        break
                    now[slot] = max(now[slot], end[sender[row]] + LATENCY) + HANDLING
                else:
                    now[slot] += SECONDS[op] * slower * (1 + 0.1 * rows.stage[row] * (op <= Op.FB))
                end[row] = now[slot]
                at[slot] += 1
                moved = True
    met = max(now)
    mine = [end[built.starts[s] : at[s]].tolist() for s in range(built.shape.slots)]
    return [[begin, *ends, met + 0.1, met + UPDATE] for ends in mine]


def rows_of(read: list[float], updates: int) -> np.ndarray:
    """Begin and end of every row, in nanoseconds; the updates share their time."""
    *rows, begin, end = read
    edges = np.linspace(begin, end, updates + 1)
    both = np.array([[*rows[:-1], *edges[:-1]], [*rows[1:], *edges[1:]]])
    return np.round(both * 1e9).astype(np.int64)


def as_measured(built: Schedule, steps: list[list[list[float]]], first: int = 1) -> Measured:
    """`steps` of readings in seconds, as a run hands them over."""
    updates = [
        int((built.rows.op[built.starts[rank] : built.starts[rank + 1]] == Op.UPDATE).sum())
        for rank in range(built.shape.slots)
    ]
    by_rank = [np.array([rows_of(step[rank], updates[rank]) for step in steps]) for rank in range(built.shape.slots)]
    start, end = _seconds(by_rank, built)
    stages = built.shape.stages
    sizes = [np.full(stages, size) for size in (8.0, 4.0, 1.0, 100.0, 100.0, 200.0)]
    again = np.zeros(stages, dtype=bool)
    return Measured(built, start, end, first, again, Footprint(*sizes), np.full(built.shape.slots, 333.0))


def alike(built: Schedule, count: int = 5) -> Measured:
    """Steps that are all the same, ten seconds apart."""
    return as_measured(built, [readings(built, begin=5.0 + 100 * step) for step in range(count)])


@pytest.mark.parametrize("name", METHODS)
def test_a_prediction_has_every_second_that_was_measured(name):
    found = alike(lowered(name))
    assert found.predicted().makespan == pytest.approx(found.timeline().makespan, rel=0.01)


def test_rows_stand_where_the_clocks_say():
    built = lowered("1f1b", 2, 2)
    read = readings(built)
    line = alike(built).timeline()
    assert line.measured
    assert line.start.min() == 0.0
    assert line.makespan == pytest.approx(max(one[-1] for one in read) - read[0][0])
    for slot, one in enumerate(read):
        rows = slice(int(built.starts[slot]), int(built.starts[slot + 1]) - 1)
        assert line.end[rows].tolist() == pytest.approx([t - read[0][0] for t in one[1:-2]])
        assert (line.start[rows][1:] == line.end[rows][:-1]).all()


def test_updates_begin_when_the_last_rank_is_there():
    built = lowered("interleaved", 2, 4)
    line, read = alike(built).timeline(), readings(built)
    met = max(one[-3] for one in read) - read[0][0]
    updates = built.rows.op == Op.UPDATE
    for slot in range(2):
        mine = np.flatnonzero(updates & (built.slot_of_rows() == slot))
        assert line.start[mine[0]] == pytest.approx(met)
        assert line.start[mine[1]] == line.end[mine[0]]  # two stages share the time
        assert line.end[mine[1]] == pytest.approx(met + UPDATE)


def test_a_rank_that_went_on_without_waiting_updates_when_it_did():
    built = lowered("1f1b", 2, 2)
    read = readings(built)
    read[1][-2:] = [read[1][-3] + 0.01, read[1][-3] + 0.2]  # the last rank, which is done first
    line = as_measured(built, [read]).timeline()
    update = np.flatnonzero((built.rows.op == Op.UPDATE) & (built.slot_of_rows() == 1))
    assert (line.end - line.start)[update] == pytest.approx([0.19])


def test_waiting_for_a_step_that_nobody_has_begun_is_no_part_of_it():
    built = lowered("1f1b", 2, 2)
    read = readings(built)
    early = [list(one) for one in read]
    early[1][0] -= 3.0  # the last rank ended the step before and waits already
    assert as_measured(built, [early]).timeline().makespan == as_measured(built, [read]).timeline().makespan


def test_reductions_begin_with_their_last_replica_one_after_the_other_and_end_before_any_update():
    """Rows of a second each, the second replica half a second later; sums are there long after the last row."""
    built = lower(schedule("interleaved", stages=2, microbatches=2, replicas=(2, 1), chunks=2))
    slots, read = built.slot_of_rows(), []
    for slot in range(3):
        rows = np.flatnonzero(slots == slot)
        start = np.arange(len(rows)) + 0.5 * (slot == 1)
        both = np.array([start, start + 1.0])
        reductions = np.flatnonzero(built.rows.op[rows] == Op.REDUCE)
        both[1, reductions] = 100.0 + 10.0 * np.arange(len(reductions))
        both[:, built.rows.op[rows] == Op.UPDATE] += 120.0
        read.append(np.round(both[None] * 1e9).astype(np.int64))
    start, end = _seconds(read, built)
    of_slot = [np.flatnonzero((built.rows.op == Op.REDUCE) & (slots == slot)) for slot in range(3)]
    assert [len(rows) for rows in of_slot] == [2, 2, 0]
    launched = [read[slot][0, 0, of_slot[slot][0] - built.starts[slot]] * 1e-9 for slot in range(2)]
    for rows in of_slot[:2]:
        assert start[0, rows].tolist() == pytest.approx([max(launched), 100.0])
        assert end[0, rows].tolist() == [100.0, 110.0]
    assert start[0, built.rows.op == Op.UPDATE].min() == pytest.approx(110.0)
    again = np.zeros(4, dtype=bool)
    reduce = Timed(built, start, end, again).costs(Footprint(*(np.ones(4) for _ in range(6)))).reduce
    assert sorted(reduce) == pytest.approx([0.0, 0.0, 10.0, 100.0 - max(launched)])


def test_bytes_of_a_stage_are_those_of_its_fullest_replica():
    """Of a micro-batch's rows, as many as all replicas together would keep; of the weights, each has all."""
    shape = schedule("1f1b", stages=2, microbatches=2, replicas=(2, 1)).shape
    facts = [{"stages": {stage: dict.fromkeys(PARTS, size)}} for stage, size in (("0", 8), ("0", 4), ("1", 3))]
    found = vars(_footprint(facts, shape))
    for name in PARTS:
        by_rows = name in ("activations", "until_weight", "inputs")
        assert found[name].tolist() == ([16.0, 3.0] if by_rows else [8.0, 3.0])


def test_costs_are_told_apart():
    built = lowered("1f1b")
    found = alike(built)
    timed = Timed(built, found.start, found.end, np.zeros(3, dtype=bool))
    costs = timed.costs(found.footprint)
    assert costs.forward == pytest.approx([1.0 + SEND, 1.1 + HANDLING + SEND, 1.2 + HANDLING])
    assert costs.input_grad == pytest.approx([2.1, 2.1 * 1.1 + SEND, 2.1 * 1.2 + SEND])
    assert costs.weight_grad.tolist() == [0.0] * 3
    assert costs.update == pytest.approx([UPDATE] * 3)
    assert costs.links.latency[0] == pytest.approx([LATENCY] * 2)
    # A gradient is always waited for in 1f1b: nobody can tell its handling from its way, and it makes no difference.
    assert costs.links.latency[1] == pytest.approx([LATENCY + HANDLING] * 2)


def test_weight_gradients_have_their_own_costs():
    built = lowered("zb-h1")
    found = alike(built)
    costs = Timed(built, found.start, found.end, np.zeros(3, dtype=bool)).costs(found.footprint)
    assert costs.weight_grad == pytest.approx([0.9, 0.9 * 1.1, 0.9 * 1.2])


def test_a_recomputed_forward_is_not_counted_twice():
    built = lowered("1f1b")
    found = alike(built)
    again = np.ones(3, dtype=bool)
    once, twice = (Timed(built, found.start, found.end, which).costs(found.footprint) for which in (~again, again))
    assert twice.input_grad == pytest.approx(once.input_grad - once.forward)
    whole = Measured(built, found.start, found.end, 1, again, found.footprint, found.added)
    assert whole.predicted().makespan == pytest.approx(found.predicted().makespan)


def test_a_prediction_is_made_from_the_usual_steps_before():
    built = lowered()
    speeds = [9.0, 1.0, 1.0, 5.0, 1.0, 1.0, 3.0]  # the first warms up, one is disturbed, the last is to be predicted
    steps = [readings(built, slower, 100.0 * at) for at, slower in enumerate(speeds)]
    found = as_measured(built, steps, first=0)
    assert found.predicted().makespan == pytest.approx(found.timeline(1).makespan, rel=0.01)
    assert found.predicted(slice(3, 4)).makespan == pytest.approx(found.timeline(3).makespan, rel=0.01)


def test_one_step_predicts_nothing():
    built = lowered()
    with pytest.raises(InputError, match="train at least two steps"):
        as_measured(built, [readings(built)]).predicted()


def test_two_steps_do():
    built = lowered()
    found = as_measured(built, [readings(built), readings(built, begin=100.0)], first=0)
    assert found.predicted().makespan == pytest.approx(found.timeline().makespan, rel=0.01)


def test_memory_stands_beside_the_prediction():
    found = alike(lowered("1f1b", 3, 6))
    memory = found.memory()
    standing, gradients = 300.0, 100.0
    assert [rank.predicted for rank in memory] == [standing + gradients + 8.0 * held for held in (3, 2, 1)]
    assert [rank.measured for rank in memory] == [100.0 + 333.0] * 3
    assert found.predicted().peak_activations.tolist() == [24.0, 16.0, 8.0]


def test_one_step_has_a_memory_too():
    built = lowered("1f1b", 3, 6)
    assert as_measured(built, [readings(built)], first=0).memory() == alike(built).memory()


def test_both_rows_of_an_overlapped_pair_span_it():
    built = lower(schedule("dualpipe-v", stages=2, microbatches=6, overlap=True))
    pair = np.flatnonzero(built.rows.op == Op.FB)
    start = np.arange(float(len(built)))[None, :]
    stages = built.shape.stages
    foot = Footprint(*(np.zeros(stages) for _ in range(6)))
    line = Measured(built, start, start + 1.0, 1, np.zeros(stages, dtype=bool), foot, np.zeros(2)).timeline()
    assert len(pair) > 0
    assert (line.start[pair + 1] == line.start[pair]).all()
    assert (line.end[pair] == line.end[pair + 1]).all()
    assert (line.end[pair] - line.start[pair] == 2.0).all()
    assert line.work.sum() == len(built) - np.isin(built.rows.op, (*RECEIVES, Op.SEND_F, Op.SEND_B)).sum()
