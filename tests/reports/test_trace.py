"""The trace is complete, in order, and its arrows lie within the slices they join."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from timelines import CASES, plain

from penstock.core.action import COMPUTE, Op
from penstock.reports.hops import hops
from penstock.reports.trace import trace

ALL = ["plain", "overlapped pairs", "replicas that split", "replicas in turns", "two chunks", "weight gradients apart"]


def events(line, phase: str) -> list[dict]:
    return [event for event in json.loads(trace(line))["traceEvents"] if event["ph"] == phase]


def threads(line) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events(line, "M") if e["name"] == "thread_name"}


@pytest.mark.parametrize("case", ALL)
def test_every_compute_action_is_there_once(case):
    line = CASES[case]()
    names = threads(line)
    found = Counter((names[e["tid"]], e["name"]) for e in events(line, "X") if "links" not in names[e["tid"]])
    expected = Counter()
    shape = line.schedule.shape
    for slot in range(shape.slots):
        rank, replica = int(shape.slot_rank[slot]), int(shape.slot_replica[slot])
        label = f"rank {rank}.{replica}" if shape.replicas[rank] > 1 else f"rank {rank}"
        expected.update((label, str(a)) for a in line.schedule.actions(slot) if a.op in (*COMPUTE, Op.UPDATE))
    assert found == expected


def test_times_are_microseconds_and_details_are_told():
    line = plain()
    found = next(e for e in events(line, "X") if e["name"] == "1B2")
    row = next(row for row in range(len(line.schedule)) if str(line.schedule.action(row)) == "1B2")
    assert found["ts"] == pytest.approx(line.start[row] * 1e6)
    assert found["dur"] == pytest.approx((line.end[row] - line.start[row]) * 1e6)
    assert found["args"] == {
        "operation": "full backward",
        "stage": 1,
        "micro-batch": 2,
        "mini-batch": 0,
        "weight version": 0,
    }


def test_threads_stand_in_rank_order():
    line = CASES["replicas that split"]()
    order = {e["tid"]: e["args"]["sort_index"] for e in events(line, "M") if e["name"] == "thread_sort_index"}
    names = threads(line)
    told = [names[tid] for tid in sorted(order, key=order.__getitem__)]
    assert [name for name in told if "links" not in name] == ["rank 0.0", "rank 0.1", "rank 1"]
    assert told.index("rank 0.0 links") == told.index("rank 0.0") + 1
    assert 0 not in names


@pytest.mark.parametrize("case", ALL)
def test_slices_of_a_thread_never_overlap(case):
    line = CASES[case]()
    by_thread = defaultdict(list)
    for event in events(line, "X"):
        by_thread[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_thread.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))


@pytest.mark.parametrize("case", ALL)
def test_arrows_join_the_slices_of_maker_and_user(case):
    line = CASES[case]()
    slices = {(e["tid"], e["name"]): e for e in events(line, "X")}
    starts, ends = ({e["id"]: e for e in events(line, phase)} for phase in "sf")
    found = hops(line)
    assert len(events(line, "s")) == len(events(line, "f")) == len(starts) == len(ends) == len(found)
    assert set(starts) == set(ends)
    for hop, number in enumerate(sorted(starts)):
        start, end = starts[number], ends[number]
        maker = slices[start["tid"], str(line.schedule.action(int(found.maker[hop])))]
        user = slices[end["tid"], str(line.schedule.action(int(found.user[hop])))]
        assert maker["ts"] <= start["ts"] < maker["ts"] + maker["dur"]
        assert end["ts"] == user["ts"]
        assert end["bp"] == "e"
        assert start["ts"] <= end["ts"]


def test_transfers_and_reductions_run_beside():
    line = CASES["replicas that split"]()
    names = threads(line)
    beside = [e["name"] for e in events(line, "X") if "links" in names[e["tid"]]]
    rows = line.schedule.rows.op
    assert len(beside) == np.isin(rows, (Op.SEND_F, Op.SEND_B, Op.REDUCE)).sum()
    assert any(">" in name for name in beside)
    assert any("R" in name for name in beside)


def test_counters_reach_the_peaks():
    line = plain()
    peaks = defaultdict(float)
    for event in events(line, "C"):
        peaks[event["name"]] = max(peaks[event["name"]], sum(event["args"].values()))
    assert peaks == {f"memory rank {rank}": 4 - rank for rank in range(4)}


def test_ids_of_two_processes_never_meet():
    both = json.loads(trace([("a", plain()), ("b", plain())]))["traceEvents"]
    assert max(Counter(e["id"] for e in both if e["ph"] == "s").values()) == 1
