"""Whatever is handed in, a caller gets a schedule or one message of ours."""

from __future__ import annotations

import pytest

from penstock import InputError, check, loop, schedule, simulate

WRONG = [
    {"stages": "4"},
    {"stages": 4.0},
    {"stages": None},
    {"stages": True},
    {"stages": 100_000_000},
    {"microbatches": "8"},
    {"microbatches": 3_000_000_000},
    {"batches": 2.0},
    {"chunks": "2"},
    {"replicas": 2.0},
    {"replicas": None},
    {"replicas": "2,1"},
    {"replicas": True},
    {"replicas": [1.5, 1]},
    {"replicas": 1_000_000_000},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("name", ["1f1b", "pipedream", "auto"])
def test_counts_of_the_wrong_kind_are_refused(name, wrong):
    with pytest.raises(InputError, match=f"expected .*{next(iter(wrong))}|expected .*whole number|expected .*at most"):
        schedule(name, **({"stages": 2, "microbatches": 4} | wrong))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dualpipe-v", {"overlap": "no"}),
        ("pipedream", {"stash": "no"}),
        ("pipedream", {"vertical_sync": 0}),
        ("dapple", {"cap": True}),
        ("dapple", {"cap": 0}),
    ],
)
def test_options_of_the_wrong_kind_are_refused(name, options):
    with pytest.raises(InputError, match=next(iter(options))):
        schedule(name, stages=2, microbatches=4, **options)


@pytest.mark.parametrize("name", [None, 3, "", "1F1B"])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(InputError, match="the name of a method"):
        schedule(name, stages=2, microbatches=2)


@pytest.mark.parametrize(
    "wrong",
    [{"forward": "abc"}, {"forward": {}}, {"forward": [[1, 2]]}, {"weight_grad_memory": None}, {"recompute": "no"}],
    ids=str,
)
def test_costs_of_the_wrong_kind_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        simulate(schedule("1f1b", stages=2, microbatches=2), **wrong)


def test_other_wrong_words_are_refused():
    with pytest.raises(InputError, match="batches"):
        loop("pipedream", stages=2).unroll("3")
    with pytest.raises(InputError, match="transfers to be buffered"):
        check(schedule("1f1b", stages=2, microbatches=2), transfers="bogus")


def test_the_ring_of_interleaved_needs_its_own_transfer():
    built = schedule("interleaved", stages=4, microbatches=4)
    with pytest.raises(InputError, match="the last joins the last rank and the first"):
        simulate(built, transfer=[1, 1, 1])
    assert simulate(built, transfer=[1, 1, 1, 1]).makespan == simulate(built, transfer=1).makespan
    straight = schedule("1f1b", stages=4, microbatches=4)
    assert simulate(straight, transfer=[1, 1, 1]).makespan == simulate(straight, transfer=1).makespan
