"""The order in which one process runs all slots: every action once, each slot in its own order, needs before uses."""

from __future__ import annotations

import pytest

from penstock import schedule
from penstock.core.action import Op
from penstock.core.check import prove
from penstock.engine.order import dependency_order

# 1F1B on 3 ranks: each rank goes as far as it can, so the first runs its three forwards at once.
ORDER = "0F0 0F1 0F2 1F0 1F1 2F0 2B0 2F1 2B1 0B0 ..."


def compute(proven):
    parts = ((slot, part) for slot, action in dependency_order(proven) for part in (action, action.joined) if part)
    return [(slot, action) for slot, action in parts if action.op <= Op.FB]


def test_each_rank_goes_as_far_as_it_can():
    words = [str(action) for _, action in compute(prove(schedule("1f1b", stages=3, microbatches=4)))]
    assert words[:9] == ORDER.split()[:9]


@pytest.mark.parametrize(
    "name", ["naive", "gpipe", "1f1b", "dapple", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"]
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_needs_come_before_uses(name, ranks):
    proven = prove(schedule(name, stages=ranks, microbatches=8))
    order = compute(proven)
    at = {("F" if a.op is Op.FB else a.op.name, a.stage, a.microbatch): place for place, (_, a) in enumerate(order)}
    assert len(at) == len(order) == int(proven.schedule.is_compute().sum())
    last = proven.schedule.shape.stages - 1
    for (op, stage, k), place in at.items():
        if op == "F" and stage > 0:
            assert at["F", stage - 1, k] < place
        if op in "BI":
            assert at["F", stage, k] < place
            if stage < last:
                assert at.get(("B", stage + 1, k), at.get(("I", stage + 1, k))) < place
        if op == "W":
            assert at["I", stage, k] < place
    for slot in range(proven.schedule.shape.slots):
        mine = [str(action) for where, action in order if where == slot]
        assert mine == [str(p) for a in proven.schedule.actions(slot) for p in (a, a.joined) if p and p.op <= Op.FB]
