"""Timelines of real processes: every rank's rows on one clock, fit for every report, and near to their prediction."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hosts import HERE, run
from timeline_rank import BACKWARD, FORWARD, SCHEDULES, WIDE, WITH_REPLICAS

from penstock.core.action import Op
from penstock.core.match import match
from penstock.core.timeline import Timeline
from penstock.reports.gantt import gantt
from penstock.reports.html import html
from penstock.reports.svg import svg
from penstock.reports.tables import memory_table, summary
from penstock.reports.trace import trace

PROGRAM = Path(__file__).with_name("timeline_rank.py")
RECEIVES = (Op.RECV_F, Op.RECV_B)
MIB = 2.0**20


def ask(tmp_path: Path, ranks: int, *arguments: str, **environment: str) -> list:
    """What every rank has found."""
    what, *rest = arguments
    run([str(PROGRAM), what, str(tmp_path / "out"), *rest], [HERE] * ranks, limit=150, **environment)
    return [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    """Of every rank."""
    return ask(tmp_path_factory.mktemp("timelines"), request.param, "timelines")


@pytest.fixture(params=SCHEDULES)
def lines(request, found):
    """All measured steps of a schedule, and the last one as predicted from those before."""
    told = found[0][request.param]
    return [Timeline.from_json(line) for line in told["measured"]], Timeline.from_json(told["predicted"])


def test_every_rank_has_the_same(found):
    assert all(told == found[0] for told in found)
    assert all(of["last"] == of["measured"][-1] for of in found[0].values())


def test_rows_follow_each_other_and_take_what_stages_take(lines):
    for line in lines[0]:
        built, op = line.schedule, line.schedule.rows.op
        assert line.measured
        assert line.start.min() == 0.0
        assert (line.end >= line.start).all()
        for first, last in zip(built.starts[:-1], built.starts[1:], strict=True):
            assert (line.start[first + 1 : last] >= line.end[first : last - 1]).all()
        seconds = line.end - line.start
        assert (seconds[op == Op.F] >= FORWARD).all()
        assert (seconds[np.isin(op, (Op.B, Op.I))] >= BACKWARD).all()


def test_nothing_is_received_before_it_was_sent(lines):
    for line in lines[0]:
        pairs = match(line.schedule)
        known = pairs.sends >= 0
        assert known.any()
        assert (line.end[pairs.receives[known]] > line.start[pairs.sends[known]]).all()


def test_updates_come_last(lines):
    line = lines[0][-1]
    update, slot = line.schedule.rows.op == Op.UPDATE, line.schedule.slot_of_rows()
    assert line.end.argmax() in np.flatnonzero(update)
    for at in range(line.schedule.shape.slots):
        assert line.start[update & (slot == at)].min() >= line.end[~update & (slot == at)].max()


def test_the_prediction_is_near(lines):
    """Others use the cores too, so this is no proof of how near; benchmarks and pictures are for that."""
    measured, predicted = lines
    usual = np.median([line.makespan for line in measured[1:]])
    assert predicted.makespan == pytest.approx(usual, rel=0.25)
    assert not predicted.measured
    assert predicted.memory is not None


def test_every_report_draws_it(lines):
    measured, predicted = lines[0][-1], lines[1]
    pair = [("predicted", predicted), ("measured", measured)]
    ranks = measured.schedule.shape.ranks
    assert len(str(gantt(measured, 100)).splitlines()) >= ranks + 2
    _, table = summary(measured).renderables
    assert len(table.rows) == len(memory_table(predicted).rows) == ranks
    ElementTree.fromstring(svg(measured))
    both = svg(pair)
    texts = [element.text for element in ElementTree.fromstring(both).iter("{http://www.w3.org/2000/svg}text")]
    assert {"predicted", "measured"} <= set(texts)
    assert sum("makespan" in (text or "") for text in texts) == 2
    assert html(pair).startswith("<!doctype html>")
    events = json.loads(trace(pair))["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}
    assert all(event["ts"] >= 0 for event in events if "ts" in event)


def test_json_goes_both_ways(lines):
    line = lines[0][-1]
    again = Timeline.from_json(json.loads(json.dumps(line.to_json())))
    assert again.to_json() == line.to_json()
    assert again.measured
    assert again.figures() == line.figures()


@pytest.fixture(scope="module")
def replicated(tmp_path_factory):
    """Of every rank: two replicas of the first stages, and the last."""
    return ask(tmp_path_factory.mktemp("replicas"), 3, "replicas")


@pytest.mark.parametrize("name", WITH_REPLICAS)
class TestReplicas:
    def test_a_reduction_lasts_from_its_last_replica_to_its_sums(self, replicated, name):
        """Both replicas' rows say the same, the update waits for both, and no compute of a slot is later than its
        reduction's begin unless another stage's."""
        for told in replicated[0][name]["measured"]:
            line = Timeline.from_json(told)
            rows, slots = line.schedule.rows, line.schedule.slot_of_rows()
            reductions = np.flatnonzero(rows.op == Op.REDUCE)
            stages = set(rows.stage[slots == 0].tolist())
            assert set(rows.stage[reductions].tolist()) == stages
            for stage in stages:
                first, second = reductions[rows.stage[reductions] == stage]
                assert (slots[first], slots[second]) == (0, 1)
                assert line.start[first] == pytest.approx(line.start[second])
                assert abs(line.end[first] - line.end[second]) < 0.05
                for row in (first, second):
                    own = (slots == slots[row]) & (rows.stage == stage)
                    backward = own & np.isin(rows.op, (Op.B, Op.I, Op.W))
                    assert line.end[row] > line.start[row] >= line.end[backward].max()
                    assert line.start[own & (rows.op == Op.UPDATE)].min() >= line.end[row]

    def test_what_is_received_is_what_the_formula_says(self, replicated, name):
        """Of two replicas each gets half of the gradients and half of the sums, 2 (n - 1) / n of them; the first step
        apart from the others in nothing."""
        own = replicated[0][name]["gradients"][:: 2 if name == "interleaved" else 1]
        first = sum(own) if name == "interleaved" else own[0]
        for rank in range(2):
            assert replicated[rank][name]["received"] == pytest.approx([first] * 6, rel=0.01)
        assert replicated[2][name]["received"] == [0] * 6

    def test_bytes_and_seconds_are_those_of_a_whole_micro_batch(self, replicated, name):
        told = replicated[0][name]
        weights = WIDE * (WIDE + 1) * 4
        rows, stages = 4 * WIDE * 4, len(told["footprint"]["weights"])
        assert told["footprint"]["weights"] == told["footprint"]["gradients"] == [weights] * stages
        # the input, its product and the sleeper's result, the same tensor; the last stage's loss has two more
        assert min(told["footprint"]["activations"]) >= 2 * rows
        assert max(told["footprint"]["activations"]) <= 5 * rows
        reduced = [stage for stage in range(stages) if stage % 2 == 0]
        assert all((told["reduce"][stage] > 0) == (stage in reduced) for stage in range(stages))

    def test_the_prediction_is_near_and_every_report_draws_it(self, replicated, name):
        measured = [Timeline.from_json(line) for line in replicated[0][name]["measured"]]
        predicted, last = Timeline.from_json(replicated[0][name]["predicted"]), measured[-1]
        usual = np.median([line.makespan for line in measured[1:]])
        assert predicted.makespan == pytest.approx(usual, rel=0.25)
        pair = [("predicted", predicted), ("measured", last)]
        assert {"rank 0.0", "rank 0.1", "rank 1"} <= {
            line.split("  ")[0] for line in str(gantt(last, 100)).splitlines()
        }
        _, table = summary(last).renderables
        assert len(table.rows) == len(memory_table(predicted).rows) == 3
        both = svg(pair)
        ElementTree.fromstring(both)
        assert "reduction over replicas" in both
        assert html(pair).startswith("<!doctype html>")
        names = {event["name"] for event in json.loads(trace(pair))["traceEvents"]}
        assert any(word.startswith("0R") for word in names)


@pytest.mark.parametrize(
    ("hosts", "shifts"),
    [
        ("a b", [0, 3_600_000_000_000]),
        ("a b", [500_000_000, -7_000_000_000]),
        ("a b b a", [0, 10**12, 10**12, 0]),
    ],
)
def test_clocks_of_other_hosts_are_set_right(tmp_path, hosts, shifts):
    told = ask(tmp_path, len(shifts), "offsets", HOSTS=hosts, SHIFT=" ".join(map(str, shifts)))
    assert all(offsets == told[0] for offsets in told)
    expected = [shift - shifts[0] for shift in shifts]
    assert told[0] == pytest.approx(expected, abs=5_000_000)  # nanoseconds: half a round, on busy cores
    assert len(set(told[0])) == len(set(hosts.split()))  # ranks of one host read one clock


def test_ranks_of_one_host_need_no_setting(tmp_path):
    assert ask(tmp_path, 2, "offsets", HOSTS="a a", SHIFT="0 0") == [[0, 0]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gpipe", "1f1b"])
def test_memory_is_what_the_schedule_holds(tmp_path, method):
    told = ask(tmp_path, 2, "memory", method)[0]
    one = 16384 * 64 * 4 / MIB
    # A rank's four layers keep each the input of the linear part and of the GELU; rank 0's first input is the batch's.
    kept = np.array(told["kept"]["activations"]) / MIB
    assert kept == pytest.approx([8 * one + one, 8 * one + 2 * one], abs=1.1 * one)
    assert told["kept"]["inputs"] == [0.0, one * MIB]
    for rank in told["ranks"]:
        # More: the tensors that a row works with, and those on their way.
        assert -2 * one < (rank["measured"] - rank["predicted"]) / MIB < 5 * one
        assert rank["predicted"] > 9 * one * MIB
