"""The executor: every row once, each slot in its own order, needs before uses; observers are told of all of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import penstock
from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow
from penstock.engine.observer import Observer
from penstock.errors import InputError

# 1F1B on 3 ranks: each rank goes as far as it can, so the first runs its three forwards at once.
ORDER = "0F0 0F1 0F2 1F0 1F1 2F0 2B0 2F1 2B1 0B0 ..."
METHODS = ["naive", "gpipe", "1f1b", "dapple", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"]


class Recorder(Observer):
    """Keeps the slot and the row of everything that has run."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ActionRow]] = []
        self.slot = -1

    def begin(self, slot: int) -> None:
        self.slot = slot

    def after(self, row: ActionRow) -> None:
        self.rows.append((self.slot, row))

    @property
    def compute(self) -> list[tuple[int, ActionRow]]:
        return [(slot, row) for slot, row in self.rows if row.op <= Op.FB]


def pipeline(name: str, ranks: int, microbatches: int = 8) -> penstock.Pipeline:
    chunks = 2 if name in ("interleaved", "zb-v", "dualpipe-v") else 1
    torch.manual_seed(0)
    return penstock.Pipeline(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(ranks * chunks))),
        example=torch.randn(2, 4),
        stages=ranks,
        chunks=chunks if name == "interleaved" else None,
        schedule=name,
        microbatches=microbatches,
        loss=lambda out, _: out.square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        verify=False,
    )


def recorded(name: str, ranks: int, microbatches: int = 8) -> tuple[penstock.Pipeline, Recorder]:
    pipe, recorder = pipeline(name, ranks, microbatches), Recorder()
    pipe.observers.add(recorder)
    pipe.step(torch.randn(microbatches, 4))
    return pipe, recorder


def test_each_rank_goes_as_far_as_it_can():
    _, recorder = recorded("1f1b", 3, 4)
    words = [f"{row.stage}{row.op.name}{row.microbatch}" for _, row in recorder.compute]
    assert words[:9] == ORDER.split()[:9]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_needs_come_before_uses(name, ranks):
    pipe, recorder = recorded(name, ranks)
    order = recorder.compute
    at = {("F" if r.op is Op.FB else r.op.name, r.stage, r.microbatch): place for place, (_, r) in enumerate(order)}
    assert len(at) == len(order) == int(pipe.schedule.is_compute().sum())
    last = pipe.schedule.shape.stages - 1
    for (op, stage, k), place in at.items():
        if op == "F" and stage > 0:
            assert at["F", stage - 1, k] < place
        if op in "BI":
            assert at["F", stage, k] < place
            if stage < last:
                assert at.get(("B", stage + 1, k), at.get(("I", stage + 1, k))) < place
        if op == "W":
            assert at["I", stage, k] < place


@pytest.mark.parametrize("name", METHODS)
def test_every_row_of_the_schedule_runs_once_in_its_slot_s_order(name):
    pipe, recorder = recorded(name, 2)
    rows = pipe.schedule.rows
    for slot in range(2):
        ran = [(row.op, row.stage, row.microbatch, row.peer) for where, row in recorder.rows if where == slot]
        mine = slice(int(pipe.schedule.starts[slot]), int(pipe.schedule.starts[slot + 1]))
        columns = (rows.op, rows.stage, rows.microbatch, rows.peer)
        assert ran == list(zip(*(column[mine].tolist() for column in columns), strict=True))


def test_an_observer_that_counts_rows():
    class Count(Observer):
        def __init__(self) -> None:
            self.rows: Counter[Op] = Counter()

        def after(self, row: ActionRow) -> None:
            self.rows[row.op] += 1

    pipe, count = pipeline("zb-h1", 2), Count()
    pipe.observers.add(count)
    pipe.step(torch.randn(8, 4))
    assert count.rows == {op: 8 * n for op, n in ((Op.F, 2), (Op.I, 2), (Op.W, 2))} | dict.fromkeys(
        (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B), 8
    ) | {Op.UPDATE: 2}
    pipe.observers.discard(count)
    pipe.step(torch.randn(8, 4))
    assert count.rows.total() == 8 * 10 + 2


def test_rows_that_are_not_built_are_refused_by_name():
    executor = pipeline("1f1b", 2).executor
    for op, what in ((Op.UNSHARD, "sharded"), (Op.RESHARD, "sharded")):
        with pytest.raises(InputError, match=what):
            executor.run([[ActionRow(op, 0, -1, 1, -1)], []])
