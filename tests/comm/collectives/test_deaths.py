"""Failures of one rank amid a reduction end all in time, with their cause, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from team import Team, here

LIMIT = 5.0  # seconds in which all have to end
EVERYBODY = (0, 1, 2)


@pytest.fixture
def team() -> Iterator[Team]:
    before = shm()
    started = Team(here(len(EVERYBODY)))
    started.ask("reduce", EVERYBODY, [((10,), "float32", "")], [1])
    yield started
    started.ranks.__exit__()
    assert shm() == before


def shm() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.parametrize(("victim", "size"), [(0, 10), (1, 3_000_000), (2, 300_000)])
def test_a_rank_killed_amid_a_reduction_ends_the_others(team, victim, size):
    for rank in EVERYBODY:
        team.tell(rank, "dies_amid", EVERYBODY, victim, 0.3, size)
    assert team.gone(20) < 0.3 + LIMIT
    for rank, ended in enumerate(team.ranks.ranks):
        if rank == victim:
            assert ended.code == -9
        else:
            assert ended.code == 1, ended.error
            assert f"rank {victim} died" in ended.error, ended.error
            assert "Traceback" not in ended.error, ended.error


@pytest.mark.parametrize("way", ["raise", "exit", "leave"])
def test_a_rank_that_never_starts_ends_those_that_wait(team, way):
    for rank in EVERYBODY:
        team.tell(rank, "deserts", EVERYBODY, 1, way)
    assert team.gone(20) < LIMIT
    codes = [ended.code for ended in team.ranks.ranks]
    assert codes == [1, {"raise": 1, "exit": 0, "leave": 0}[way], 1]
    words = {"raise": "rank 1 failed", "exit": "rank 1 has ended, but rank", "leave": "rank 1 died"}[way]
    for rank in (0, 2):
        assert words in team.ranks.ranks[rank].error
        assert "Traceback" not in team.ranks.ranks[rank].error


def test_a_rank_that_ends_with_a_reduction_under_way_ends_in_order(team):
    """Its script is over though the others never came: its thread is brought back, and nothing is aborted."""
    for rank in EVERYBODY:
        team.tell(rank, "abandons", EVERYBODY, 0)
    assert team.gone(20) < LIMIT
    assert [ended.code for ended in team.ranks.ranks] == [0, 0, 0]
    assert all(ended.error == "" for ended in team.ranks.ranks)


def test_a_rank_that_is_waited_for_too_long_is_named(team):
    for rank in EVERYBODY:
        team.tell(rank, "is_late", EVERYBODY, 2, 1.0)
    assert team.gone(20) < LIMIT + 1
    for rank in (0, 1):
        error = team.ranks.ranks[rank].error
        assert "longer than the time-out" in error, error
        assert "rank 2: before its first step; computes, waits for no rank" in error or "stops" in error, error


def test_a_reduction_that_fails_fails_in_wait_on_that_rank_alone(team):
    """And the others learn of it as of any exception."""
    for rank in EVERYBODY:
        team.tell(rank, "breaks", EVERYBODY, 0)
    assert team.gone(20) < LIMIT
    assert "rank 0 failed: RuntimeError: the disk is full" in team.ranks.ranks[0].error
    for rank in (1, 2):
        assert "rank 0 failed: RuntimeError: the disk is full" in team.ranks.ranks[rank].error
        assert "Traceback" not in team.ranks.ranks[rank].error
