"""All-reduce between real processes of one host: bits, order, refusals, memory."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sums import Spec, total

from penstock.comm.collectives.segment import BUCKET, SLOTS

DTYPES = ["float64", "float32", "bfloat16", "float16", "int64", "int8"]
SIZES = [0, 1, 7, 63, 64, 65, 1000, 40_000, BUCKET // 8, BUCKET // 8 + 1, BUCKET // 2 - 1, 3 * BUCKET // 4]
SPECS = st.tuples(
    st.one_of(
        st.just(()),
        st.sampled_from(SIZES).map(lambda size: (size,)),
        st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    ),
    st.sampled_from(DTYPES),
    st.sampled_from(["", "", "strided", "transposed"]),
).map(lambda spec: spec if spec[0] else ((), spec[1], ""))
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def totals(specs: list[Spec], seeds: list[int], ranks: tuple[int, ...]) -> list[list[bytes]]:
    return [[total(spec, 100 * seed + at, ranks) for at, spec in enumerate(specs)] for seed in seeds]


@FEW
@given(specs=st.lists(SPECS, max_size=5), seeds=st.lists(st.integers(0, 99), min_size=1, max_size=3))
def test_sums_equal_adding_in_the_order_of_the_ranks_bit_for_bit(team, specs, seeds):
    everybody = tuple(range(team.size))
    wanted = totals(specs, seeds, everybody)
    assert team.ask("reduce", everybody, specs, seeds) == [wanted] * team.size


def test_the_order_of_adding_matters_and_is_kept_whoever_comes_first(team):
    """Values of other magnitudes on every rank: another order gives other bits."""
    specs: list[Spec] = [((200_000,), "float32", ""), ((5, 300), "bfloat16", "")]
    everybody, dice = tuple(range(team.size)), random.Random(0)
    wanted = totals(specs, [3], everybody)
    if team.size > 2:
        assert totals(specs, [3], everybody[::-1]) != wanted
    for _ in range(4):
        for rank in everybody:
            team.tell(rank, "reduce", everybody, specs, [3], dice.random() * 0.05)
        assert [team.answer(rank) for rank in everybody] == [wanted] * team.size


def test_two_groups_of_one_world_at_a_time(four):
    specs: list[Spec] = [((300_000,), "float32", ""), ((7, 5), "float64", "")]
    for groups in [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 3),)]:
        for group in groups:
            for rank in group:
                four.tell(rank, "reduce", group, specs, [1, 2])
        for group in groups:
            assert [four.answer(rank) for rank in group] == [totals(specs, [1, 2], group)] * len(group)


def test_a_rank_in_two_groups(four):
    """Each is a reducer of its own: one may be waited for while the other is under way."""
    spec: Spec = ((100_000,), "float32", "")
    begun = [(0, (0, 1)), (1, (0, 1)), (1, (1, 2)), (2, (1, 2))]
    for rank, group in begun:
        four.tell(rank, "begin", group, [spec], 4)
    for rank, _ in begun:
        four.answer(rank)
    assert four.ask("finish", ranks=[0, 1]) == [[total(spec, 400, (0, 1))]] * 2
    assert four.ask("finish", ranks=[2, 1]) == [[total(spec, 400, (1, 2))]] * 2


def test_start_does_not_wait_for_the_others(team):
    specs: list[Spec] = [((1_000_000,), "float32", "")]
    everybody = tuple(range(team.size))
    team.ask("reduce", everybody, specs, [1])  # open
    team.tell(0, "begin", everybody, specs, 2)
    assert team.answer(0) < 1.0
    assert team.ask("is_done", ranks=[0]) == [[False]]
    team.ask("begin", everybody, specs, 2, ranks=everybody[1:])
    assert team.ask("finish") == totals(specs, [2], everybody) * team.size


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ([((4, 5), "float32", ""), ((8,), "float64", "")], r"as tensor 1 \(7,\) float64 on rank 0 and \(8,\) float64"),
        ([((4, 5), "float32", ""), ((7,), "float32", "")], r"as tensor 1 \(7,\) float64 on rank 0 and \(7,\) float32"),
        ([((5, 4), "float32", ""), ((7,), "float64", "")], r"tensor 0 \(4, 5\) float32 on rank 0 and \(5, 4\) float32"),
        ([((4, 5), "float32", "")], r"as tensor 1 \(7,\) float64 on rank 0 and none on rank"),
        ([], r"as tensor 0 \(4, 5\) float32 on rank 0 and none on rank"),
    ],
)
def test_unlike_tensors_are_refused_by_name_on_all(team, odd, words):
    everybody, usual = tuple(range(team.size)), [((4, 5), "float32", ""), ((7,), "float64", "")]
    specs = {rank: odd if rank == team.size - 1 else usual for rank in everybody}
    said = team.ask("refused", everybody, specs)
    assert said == [said[0]] * team.size
    names = ", ".join(map(str, everybody))
    assert said[0].startswith(f"expected the same reductions in the same order on ranks {names}, but got as tensor")
    assert re.search(words, said[0])


def test_what_cannot_be_added_is_refused(four):
    for what, words in {
        "sparse": "expected plain dense tensors to reduce over ranks, but got tensor 1 as torch.sparse_coo",
        "bool": "expected numbers that can be added up over ranks, but got tensor 0 of bool",
        "meta": "expected tensors on cpu to reduce over ranks, but got tensor 0 on meta",
    }.items():
        assert all(said.startswith(words) for said in four.ask("unusual", what))


def test_groups_that_are_none(four):
    for group, words in {
        (0,): "expected two ranks or more of 0 to 3 to reduce over, ascending, but got [0]",
        (1, 0): "expected two ranks or more of 0 to 3 to reduce over, ascending, but got [1, 0]",
        (0, 4): "expected two ranks or more of 0 to 3 to reduce over, ascending, but got [0, 4]",
        (2, 3): "expected rank 0 in the group that it opens a reducer for, but got [2, 3]",
    }.items():
        assert four.ask("opened", group, ranks=[0])[0].startswith(words)


def test_views_of_one_memory_are_summed_apart(four):
    assert four.ask("overlapping", (0, 1, 2, 3)) == ["as expected"] * 4


def test_memory_is_bounded_and_given_back(four):
    everybody = (0, 1, 2, 3)
    four.ask("reduce", everybody, [((10,), "float32", "")], [1])
    small = four.ask("memory")
    four.ask("reduce", everybody, [((8_000_000,), "float32", "")], [1])
    assert four.ask("memory") == small
    bound = SLOTS * BUCKET + 2 * 4096  # slots, with two pages of words
    assert [each["open"] for each in small] == [0] * 4
    before = four.ask("kept", everybody, 1)
    assert four.ask("kept", everybody, 20) == before
    assert all(each["mapped"] == each["segments"] * bound for each in before)


def test_a_forked_child_has_no_part_in_it(four):
    everybody, specs = (0, 1, 2, 3), [((1000,), "float32", "")]
    assert four.ask("forked", everybody) == [7] * 4
    assert four.ask("reduce", everybody, specs, [5]) == [totals(specs, [5], everybody)] * 4
