"""Numbers, slots and ticks in words."""

from __future__ import annotations

import pytest
from timelines import CASES, plain

from penstock.core.shape import Law, Shape
from penstock.reports.axis import tick_step, ticks
from penstock.reports.describe import amount, chunk_of_stage, number, seconds, slot_labels
from penstock.reports.figures import figures, headline


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0 s"), (1.5, "1.5 s"), (0.0123456, "12.35 ms"), (1e-3, "1 ms"), (4.2e-6, "4.2 µs"), (3e-9, "3 ns")],
)
def test_seconds(value, said):
    assert seconds(value) == said


@pytest.mark.parametrize(("value", "said"), [(0.5, "0.5"), (1234567, "1,234,567"), (12.0, "12"), (1 / 3, "0.3333")])
def test_number(value, said):
    assert number(value) == said


def test_amount():
    assert amount(3 * 2**29, True) == "1.5 GiB"
    assert amount(12, True) == "12 B"
    assert amount(2.5, False) == "2.5 A"


def test_slots_are_numbered_by_rank_and_replica():
    assert slot_labels(Shape("x", Law.SYNC, (0, 1), 1, replicas=(2, 1))) == ["rank 0.0", "rank 0.1", "rank 1"]


def test_chunks_are_counted_in_model_order():
    assert chunk_of_stage(Shape("x", Law.SYNC, (0, 1, 1, 0), 1)).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("span", "step"), [(38.3, 5), (10, 1), (0.012, 0.002), (7e-6, 1e-6), (6045, 1000)])
def test_ticks_are_round(span, step):
    assert tick_step(span, 10) == pytest.approx(step)
    moments = [moment for moment, _ in ticks(span, 10)]
    assert moments[0] == 0
    assert span - step < moments[-1] <= span * (1 + 1e-9)


def test_ticks_have_one_unit():
    assert [label for _, label in ticks(0.004, 4)] == ["0 ms", "1 ms", "2 ms", "3 ms", "4 ms"]


def test_figures():
    line = plain()
    told = figures(line)
    assert told["makespan"] == "38.3 s"
    assert told["bubble"] == f"{100 * line.bubble:.1f}%"
    assert told["peak activations"] == "4 A"
    assert headline(line).startswith("1f1b, predicted: makespan 38.3 s of one mini-batch, bubble")
    assert "MiB" in figures(CASES["in bytes"]())["peak activations"]
    assert "peak activations" not in figures(CASES["measured"]())
