"""Reductions over hosts: network namespaces where they can be made, and ranks of this host that share no memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sums import Spec, made, raw
from team import Team, here

from distributed.hosts import can_make_hosts, two_hosts
from penstock.comm.collectives.segment import BUCKET

FEW = settings(max_examples=25, deadline=None)
LAYOUTS = {
    "a a b b": ((0, 1), (2, 3)),
    "a b a": ((0, 2), (1,)),
    "a b b b": ((0,), (1, 2, 3)),
    "gloo": ((0,), (1,), (2,)),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def spread(request) -> Iterator[tuple[Team, tuple[tuple[int, ...], ...]]]:
    """A team, and its ranks by host."""
    if request.param == "gloo":
        team = Team(here(3), PENSTOCK_TRANSPORT="gloo")
        yield team, LAYOUTS[request.param]
        team.end()
        return
    if not can_make_hosts():
        pytest.skip("needs root, to make network namespaces")
    with two_hosts() as (a, b):
        team = Team([a if name == "a" else b for name in request.param.split()])
        yield team, LAYOUTS[request.param]
        team.end()


def total(spec: Spec, seed: int, hosts: Sequence[Sequence[int]]) -> bytes:
    """The ranks of each host in their order, then the hosts."""
    sums = []
    for ranks in hosts:
        first, *rest = (made(spec, seed, rank) for rank in ranks)
        for term in rest:
            first = first + term
        sums.append(first)
    whole = sums[0]
    for term in sums[1:]:
        whole = whole + term
    return raw(whole)


PARTS = st.sampled_from([0, 0, 1, 5, 1000, BUCKET // 16, BUCKET // 8 + 3, BUCKET // 2])
SIZES = st.lists(PARTS, min_size=4, max_size=4)
DTYPES = st.sampled_from(["float64", "float32", "bfloat16", "float16", "int64"])
SEEDS = st.integers(0, 99)


def bounds_of(sizes: list[int]) -> list[int]:
    return [sum(sizes[:at]) for at in range(len(sizes) + 1)]


@FEW
@given(
    specs=st.lists(st.tuples(st.tuples(PARTS), DTYPES, st.just("")), max_size=4),
    seeds=st.lists(SEEDS, min_size=1, max_size=2),
)
def test_sums_equal_adding_within_hosts_and_then_over_them(spread, specs, seeds):
    team, hosts = spread
    wanted = [[total(spec, 100 * seed + at, hosts) for at, spec in enumerate(specs)] for seed in seeds]
    assert team.ask("reduce", tuple(range(team.size)), specs, seeds) == [wanted] * team.size


@FEW
@given(sizes=SIZES, dtype=DTYPES, seed=SEEDS)
def test_each_rank_gets_its_part_of_the_sum(spread, sizes, dtype, seed):
    team, hosts = spread
    bounds = bounds_of(sizes[: team.size])
    spec: Spec = ((bounds[-1],), dtype, "")
    whole, size = total(spec, 100 * seed, hosts), getattr(torch, dtype).itemsize
    wanted = [whole[bounds[at] * size : bounds[at + 1] * size] for at in range(team.size)]
    assert team.ask("scatter", tuple(range(team.size)), spec, bounds, seed) == wanted


@FEW
@given(sizes=SIZES, dtype=DTYPES, seed=SEEDS, inside=st.booleans())
def test_each_rank_gets_all_parts(spread, sizes, dtype, seed, inside):
    team, _ = spread
    everybody, bounds = tuple(range(team.size)), bounds_of(sizes[: team.size])
    parts = [raw(made(((size,), dtype, ""), seed, rank)) for rank, size in zip(everybody, sizes, strict=False)]
    assert team.ask("gather", everybody, dtype, bounds, seed, inside) == [b"".join(parts)] * team.size


def test_each_byte_crosses_once_each_way(spread):
    """In a reduce-scatter of S bytes, (h - 1) / h enter each of h hosts, in an all-gather as many, by one rank."""
    team, hosts = spread
    n, everybody = team.size, tuple(range(team.size))
    bounds = bounds_of([120_000] * n)
    for what, words, ways in [
        ("scatter", (((bounds[-1],), "float32", ""), bounds, 1), "s"),
        ("gather", ("float32", bounds, 1, False), "g"),
        ("reduce", ([((bounds[-1],), "float32", "")], [1]), "r"),
    ]:
        before = team.ask("traffic", everybody)
        team.ask(what, everybody, *words)
        after = team.ask("traffic", everybody)
        entered = [late[1] - early[1] for late, early in zip(after, before, strict=True)]
        for host in hosts:
            away = len(hosts) - 1
            near, far = len(host) * 120_000 * 4, (n - len(host)) * 120_000 * 4
            wanted = {"s": near * away, "g": far, "r": 2 * bounds[-1] * 4 * away / len(hosts)}[ways]
            assert entered[host[0]] == pytest.approx(wanted, rel=0.01)
            assert all(entered[rank] == 0 for rank in host[1:])


def test_what_enters_a_host_is_what_its_interface_has_received(spread):
    """The kernel's own count of bytes, within what headers and heartbeats take."""
    team, hosts = spread
    if len(hosts[0]) == len(hosts[1]) == 1:
        pytest.skip("all of them share one interface")
    everybody, specs = tuple(range(team.size)), [((2_000_000,), "float32", "")]
    team.ask("reduce", everybody, specs, [1])
    before = team.ask("received", "ps")
    team.ask("reduce", everybody, specs, [1])
    after = team.ask("received", "ps")
    for host in hosts:
        assert after[host[0]] - before[host[0]] == pytest.approx(8_000_000, rel=0.08), host


def test_unlike_tensors_are_refused_by_name_on_all(spread):
    team, _ = spread
    everybody, usual = tuple(range(team.size)), [((4, 5), "float32", ""), ((700_000,), "float64", "")]
    for odd, words in [
        (
            [((4, 5), "float32", ""), ((8,), "float64", "")],
            "as tensor 1 (700000,) float64 on rank 0 and (8,) float64 on rank",
        ),
        ([], "as tensor 0 (4, 5) float32 on rank 0 and none on rank"),
    ]:
        for who in everybody[1:]:
            said = team.ask("refused", everybody, {rank: odd if rank == who else usual for rank in everybody})
            assert said == [said[0]] * team.size
            assert f"{words} {who}" in said[0]


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
@pytest.mark.skipif(not can_make_hosts(), reason="needs root, to make network namespaces")
def test_a_rank_killed_amid_a_reduction_ends_those_of_both_hosts(victim):
    everybody = (0, 1, 2, 3)
    with two_hosts() as (a, b):
        team = Team([a, a, b, b])
        try:
            team.ask("reduce", everybody, [((10,), "float32", "")], [1])
            for rank in everybody:
                team.tell(rank, "dies_amid", everybody, victim, 0.3, 300_000)
            assert team.gone(20) < 0.3 + 5.0
            for rank, ended in enumerate(team.ranks.ranks):
                assert ended.code == (-9 if rank == victim else 1), ended.error
                assert rank == victim or f"rank {victim}" in ended.error, ended.error
                assert "terminate called" not in ended.error
        finally:
            team.ranks.__exit__()


def test_memory_that_one_rank_cannot_have_makes_all_take_gloo():
    team = Team(here(3))
    try:
        everybody, specs = (0, 1, 2), [((300_000,), "float32", "")]
        team.ask("forbid_large_files", 1)
        wanted = [[total(specs[0], 100, ((0,), (1,), (2,)))]]
        assert team.ask("reduce", everybody, specs, [1]) == [wanted] * 3
        assert all(shared == 0 and network > 0 for shared, network in team.ask("traffic", everybody))
        for pipe in team.pipes.values():
            pipe.send(("end", ()))
        assert ["which is slower" in ended.error for ended in team.ranks.wait(30)] == [True] * 3
    finally:
        team.ranks.__exit__()


def test_ranks_that_want_different_transports_are_told_so():
    team = Team(here(2))
    team.ask("wish", {0: "gloo", 1: ""})
    words = "expected the same PENSTOCK_TRANSPORT on every rank, but got gloo on rank 0 and None on rank 1"
    assert all(said.startswith(words) for said in team.ask("opened", (0, 1)))
    team.end()
