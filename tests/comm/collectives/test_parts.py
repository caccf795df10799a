"""Reduce-scatter and all-gather over parts of any size, between real processes of one host."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sums import made, raw, total

from penstock.comm.collectives.segment import BUCKET

PARTS = st.sampled_from([0, 0, 1, 5, 64, 1000, BUCKET // 16, BUCKET // 8 + 3, BUCKET // 2])
DTYPES = st.sampled_from(["float64", "float32", "bfloat16", "float16"])
SIZES = st.lists(PARTS, min_size=4, max_size=4)
SEEDS = st.integers(0, 99)
FEW = settings(max_examples=30, deadline=None)


def bounds_of(sizes: list[int]) -> list[int]:
    return [sum(sizes[:at]) for at in range(len(sizes) + 1)]


@FEW
@given(
    sizes=st.lists(PARTS, min_size=4, max_size=4),
    dtype=DTYPES,
    lies=st.sampled_from(["", "strided"]),
    seed=st.integers(0, 99),
)
def test_each_rank_gets_its_part_of_the_sum_and_the_flat_tensor_is_kept(team, sizes, dtype, lies, seed):
    everybody, bounds = tuple(range(team.size)), bounds_of(sizes[: team.size])
    spec = ((bounds[-1],), dtype, lies)
    whole, size = total(spec, 100 * seed, everybody), made(spec, 0, 0).itemsize
    wanted = [whole[start * size : stop * size] for start, stop in pairwise(bounds)]
    assert team.ask("scatter", everybody, spec, bounds, seed) == wanted


@FEW
@given(
    sizes=st.lists(PARTS, min_size=4, max_size=4),
    dtype=st.one_of(DTYPES, st.just("bool")),
    inside=st.booleans(),
    seed=st.integers(0, 99),
)
def test_each_rank_gets_all_parts(team, sizes, dtype, inside, seed):
    everybody, bounds = tuple(range(team.size)), bounds_of(sizes[: team.size])
    parts = [raw(made(((size,), dtype, ""), seed, rank)) for rank, size in zip(everybody, sizes, strict=False)]
    assert team.ask("gather", everybody, dtype, bounds, seed, inside) == [b"".join(parts)] * team.size


def test_kinds_follow_each_other(team):
    everybody = tuple(range(team.size))
    bounds = bounds_of([100_000] * team.size)
    spec = ((bounds[-1],), "float32", "")
    for seed in range(3):
        parts = team.ask("scatter", everybody, spec, bounds, seed)
        (sums,) = team.ask("reduce", everybody, [spec], [seed], ranks=everybody)[0]
        assert b"".join(parts) == sums[0] == total(spec, 100 * seed, everybody)
        gathered = team.ask("gather", everybody, "float32", bounds, seed, True)
        assert (
            gathered == [b"".join(raw(made(((100_000,), "float32", ""), seed, rank)) for rank in everybody)] * team.size
        )


def test_bytes_read_from_other_ranks_are_those_of_the_formulas(team):
    """For S bytes: reduce-scatter and all-gather (n - 1) / n each, all-reduce both."""
    n, everybody = team.size, tuple(range(team.size))
    bounds = bounds_of([120_000] * n)
    once = (n - 1) * 120_000 * 4
    for what, words, times in [
        ("scatter", (((bounds[-1],), "float32", ""), bounds, 1), 1),
        ("gather", ("float32", bounds, 1, False), 1),
        ("reduce", ([((bounds[-1],), "float32", "")], [1]), 2),
    ]:
        before = team.ask("traffic", everybody)
        team.ask(what, everybody, *words)
        after = team.ask("traffic", everybody)
        for (shared, network), (earlier, _) in zip(after, before, strict=True):
            assert shared - earlier == pytest.approx(times * once, rel=0.01)
            assert network == 0


def test_unlike_parts_are_refused_by_name_on_all(four):
    everybody = (0, 1, 2, 3)
    said = four.ask(
        "refused_parts", everybody, {0: [0, 1, 2, 3, 4], 1: [0, 1, 2, 3, 4], 2: [0, 2, 2, 3, 4], 3: [0] * 4 + [4]}
    )
    assert said == [said[0]] * 4
    assert "got reduce-scatter by [0, 1, 2, 3, 4] on rank 0 and reduce-scatter by [0, 2, 2, 3, 4] on rank 2" in said[0]


@pytest.mark.parametrize("bounds", [[0, 1, 2, 3], [0, 1, 2, 3, 5], [1, 1, 2, 3, 4], [0, 3, 2, 3, 4]])
def test_bounds_that_are_none(four, bounds):
    said = four.ask("refused_parts", (0, 1, 2, 3), dict.fromkeys(range(4), bounds))
    assert (
        said
        == [
            f"expected 5 bounds that rise from 0 to 4, the elements of the flat tensor, but got {bounds}; "
            "give the first element of the part of each of the 4 ranks, and the end of the last"
        ]
        * 4
    )


def test_a_part_that_does_not_fit(four):
    said = four.ask("refused_gather", (0, 1, 2, 3), [0, 1, 2, 3, 4])
    assert (
        said
        == ["expected this rank's part as (1,) float32, but got (2,) float32; give the part between its bounds"] * 4
    )
