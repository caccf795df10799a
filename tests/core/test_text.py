"""Schedules as CSV: both ways, readable golden files, and one clear message for a file that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import FormatError, check, from_csv, lower, schedule, to_csv
from penstock.schedules.registry import METHODS

GOLDEN = Path(__file__).parent.parent / "golden"

# One small case of each method, its options beside it; `auto` gets costs that make its choice visible.
CASES = {
    "naive": {"stages": 3, "microbatches": 2},
    "gpipe": {"stages": 3, "microbatches": 4},
    "1f1b": {"stages": 3, "microbatches": 4},
    "dapple": {"stages": 3, "microbatches": 6, "policy": "pb"},
    "interleaved": {"stages": 2, "microbatches": 4, "chunks": 2},
    "zb-h1": {"stages": 3, "microbatches": 4},
    "zb-h2": {"stages": 3, "microbatches": 6},
    "zb-v": {"stages": 2, "microbatches": 4},
    "dualpipe-v": {"stages": 2, "microbatches": 5, "overlap": True},
    "auto": {"stages": 3, "microbatches": 4, "chunks": 1, "forward": [1, 2, 1], "memory": 3},
    "pipedream": {"stages": 3, "batches": 6},
    "2bw": {"stages": 3, "microbatches": 3, "batches": 3},
    "pipemare": {"stages": 3, "microbatches": 2, "batches": 3},
}


def test_every_method_has_a_golden_file():
    assert set(CASES) == set(METHODS)
    assert {file.stem for file in GOLDEN.glob("*.csv")} == set(METHODS)


@pytest.mark.parametrize("name", CASES)
def test_a_method_still_builds_its_golden_file(name):
    built = schedule(name, **CASES[name])
    text = (GOLDEN / f"{name}.csv").read_text()
    assert to_csv(built) == text
    assert from_csv(text) == built


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_text_round_trips_plain_and_lowered(name, replicas):
    plain = schedule(name, **{**CASES[name], "replicas": replicas})
    for built in (plain, lower(plain)):
        assert from_csv(to_csv(built)) == built


def test_a_file_without_a_head_is_one_synchronous_step():
    built = from_csv("0F0,,0F1,0B0,0B1\n\n1F0,1B0,1F1,1B1\n")
    assert (built.shape.law, built.shape.placement, built.shape.total) == ("sync", (0, 1), 2)
    assert check(built).ok


def test_edges_that_skip_stages_round_trip():
    built = schedule("1f1b", stages=3, microbatches=3, edges=[(0, 1), (1, 2), (0, 2)])
    assert from_csv(to_csv(built)) == built


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0Q1\n", r"line 1, cell 2: expected a word like .* got '0Q1'"),
        ("0F0,0F1,0B\n", r"line 1, cell 3: .* got '0B'"),  # a line cut off in the middle of a word
        ("", r"expected at least one line of actions"),
        ("# law: stach\n0F0,0B0\n", r"line 1: expected law to be one of sync, stash.* got 'stach'"),
        ("# lav: sync\n0F0,0B0\n", r"line 1: expected a key among .* got 'lav'"),
        ("# microbatches: two\n0F0,0B0\n", r"line 1: expected whole numbers for 'microbatches'.* got 'two'"),
        ("# microbatches: 0\n0F0,0B0\n", r"microbatches to be a whole number of at least 1, but got 0"),
        ("# replicas: 2\n0F0,0B0\n", r"expected 2 lines of actions, one a slot, but got 1"),
        ("# edges: 0>1\n0F0,0B0\n1F0,1B0\n", r"line 1: expected edges like 0-1,1-2"),
        ("# edges: 1-0\n0F0,0B0\n1F0,1B0\n", r"edges from an earlier to a later of 2 stages"),
        ("0F0,0B0\n2F0,2B0\n", r"actions of every stage from 0 to 2, but got none of stage 1"),
        ("0F0,0B0,0F1@1,0B1@1\n", r"a law where actions name weight versions"),
    ],
)
def test_a_file_that_cannot_be_read_says_where_and_why(text, said):
    with pytest.raises(FormatError, match=said):
        from_csv(text, "mine.csv")


def test_a_line_cut_off_between_words_is_reported_by_check():
    report = check(from_csv("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n"))
    assert [fault.message for fault in report.faults] == ["0B1 is missing; add it"]


def test_a_cycle_is_reported_by_check_with_who_waits_for_whom():
    report = check(from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"))
    assert [fault.kind for fault in report.faults] == ["deadlock", "deadlock"]
    assert "waits for rank 1" in report.faults[0].message
    assert "waits for rank 0" in report.faults[1].message


def test_an_idle_replica_keeps_its_line():
    built = schedule("pipedream", stages=1, replicas=2, batches=1)
    assert from_csv(to_csv(built)) == built


@pytest.mark.parametrize(
    "dress", [lambda t: "\ufeff" + t, lambda t: t.replace("\n", "\r\n"), lambda t: t.replace(",", " , ")]
)
def test_marks_line_ends_and_spaces_of_other_editors_are_fine(dress):
    built = schedule("1f1b", stages=2, microbatches=2)
    assert from_csv(dress(to_csv(built))) == built


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# law: sync\n# law: stash\n0F0,0B0\n", "line 2: expected each key once, but got 'law'"),
        ("# batches: 1,7\n0F0,0B0\n", "line 1: expected one number for 'batches'"),
        ("# lowered: maybe\n0F0,0B0\n", "line 1: expected lowered to be no or yes, but got 'maybe'"),
        ("# edges: 0-²\n0F0,0B0\n1F0,1B0\n", "line 1: expected edges like"),
        ("0F3000000000,0B0\n", "line 1, cell 1: expected numbers below a billion"),
        ("0F0@99999999999,0B0\n", "line 1, cell 1: expected numbers below a billion"),
        ("100000000F0,0B0\n", "actions of every stage"),
        ("# microbatches: 1000000000000\n0F0,0B0\n", "at most 2147483647 micro-batches"),
        ("# placement: 0,1000000000\n0F0,0B0\n1F0,1B0\n", "a placement that uses every rank"),
    ],
)
def test_odd_heads_and_huge_numbers_are_answered_at_once(text, said):
    with pytest.raises(FormatError, match=said):
        from_csv(text, "mine.csv")
