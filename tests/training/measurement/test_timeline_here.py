"""A timeline of one process: its stages run one after the other, and every row is where it ran."""

from __future__ import annotations

import time
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock import InputError, Pipeline
from penstock.core.action import Op
from penstock.core.match import match
from penstock.core.timeline import Timeline
from penstock.reports.html import html
from penstock.reports.svg import svg

torch.set_num_threads(1)
NAP = 0.002
SYNCHRONOUS = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "auto")
WITHOUT_A_FLUSH = ("pipedream", "2bw", "pipemare")


class Napping(nn.Linear):
    """Sleeps in its forward, so that it is known how long rows last at the least."""

    def forward(self, x):
        time.sleep(NAP)
        return super().forward(x)


def pipeline(schedule: str, **options) -> Pipeline:
    model = nn.Sequential(*(Napping(3, 3) for _ in range(4)))
    return Pipeline(
        model, example=torch.ones(2, 3), stages=2, schedule=schedule, microbatches=4, loss=F.mse_loss, verify=False,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1), **options,
    )  # fmt: skip


def batches(count: int = 3) -> list:
    return [(torch.ones(8, 3), torch.zeros(8, 3))] * count


def require_sound(line: Timeline) -> None:
    built, op = line.schedule, line.schedule.rows.op
    assert line.measured
    assert (line.end >= line.start).all()
    for first, last in zip(built.starts[:-1], built.starts[1:], strict=True):
        row = np.arange(first, last - 1)
        row = row[op[row] != Op.FB]  # both rows of an overlapped pair span the whole of it
        assert (line.start[row + 1] >= line.end[row] - 1e-12).all()
    pairs = match(built)
    for sent, received in zip(pairs.sends.ravel(), pairs.receives.ravel(), strict=True):
        assert sent < 0 or line.end[received] >= line.start[sent]
    forward = op == Op.F
    assert (line.end[forward] - line.start[forward] >= NAP).all()
    busy = np.flatnonzero(op <= Op.W)  # an overlapped pair apart, whose rows share their time
    order = busy[np.argsort(line.start[busy], kind="stable")]
    if not (op == Op.FB).any():
        assert (line.start[order[1:]] >= line.end[order[:-1]] - 1e-12).all()  # one at a time
    assert len(ElementTree.fromstring(svg(line))) > 1
    assert html(line).rstrip().endswith("</html>")
    assert Timeline.from_json(line.to_json()).schedule == built


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_a_step(schedule):
    pipe = pipeline(schedule)
    with pytest.raises(InputError, match="at least one step to have been measured"):
        pipe.timeline()
    began = time.perf_counter()
    for _ in pipe.train(batches()):
        pass
    spent = time.perf_counter() - began
    line = pipe.timeline()
    require_sound(line)
    assert line.schedule == pipe.schedule
    assert line.start.min() == 0.0
    assert 16 * NAP <= line.makespan <= spent
    update = line.schedule.rows.op == Op.UPDATE
    assert line.start[update].min() >= line.end[~update].max() - 1e-12


@pytest.mark.parametrize("schedule", WITHOUT_A_FLUSH)
def test_a_run_without_a_flush_from_its_fill_to_its_drain(schedule):
    pipe = pipeline(schedule)
    with pytest.raises(InputError, match="a run that has drained"):
        pipe.timeline()
    list(pipe.train(batches(5)))
    line = pipe.timeline()
    require_sound(line)
    assert line.schedule.shape.batches == 5
    assert line.makespan >= 5 * 16 * NAP
    list(pipe.train(batches(2)))
    assert pipe.timeline().schedule.shape.batches == 2


def test_a_short_batch_and_a_failed_one():
    pipe = pipeline("1f1b")
    list(pipe.train(batches(1)))
    whole = pipe.timeline()
    with pytest.raises(InputError, match="finite"):
        pipe.step(torch.full((8, 3), torch.nan), torch.zeros(8, 3))
    assert (pipe.timeline().end == whole.end).all()
    pipe.step(torch.ones(3, 3), torch.zeros(3, 3))
    line = pipe.timeline()
    empty = (line.schedule.rows.op <= Op.W) & (line.schedule.rows.microbatch == 3)
    assert (line.end - line.start)[empty].max() < NAP
    assert line.makespan >= 12 * NAP


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_one_that_is_not_kept(schedule):
    pipe = pipeline(schedule, timeline=False)
    list(pipe.train(batches(1)))
    with pytest.raises(InputError, match="whose timeline is kept, but got timeline=False; leave timeline on"):
        pipe.timeline()
