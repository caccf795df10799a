"""The benchmark of real processes runs, and its figures are possible ones. No speed is asserted."""

import pytest
from benchmarks.workers import sleeping
from benchmarks.workers.sampling import collect
from benchmarks.workers.table import Line
from benchmarks.workers.team import Team

RANKS, SIZE = 2, {"1 KB": 256}


class Failing:
    """A contest in which one rank breaks."""

    def __init__(self, rank):
        self.rank = rank

    def step(self):
        if self.rank == 1:
            raise ValueError("of rank one")

    def close(self):
        """Nothing to drain."""


@pytest.mark.slow
def test_no_contender_beats_the_ideal():
    with Team(RANKS, sleeping.Sleeping, True, SIZE) as team:
        names = team.ask("names")[0]
        found = collect(team, names, repetitions=1, patience=1)
        peer, ours = (team.ask("held", f"1 KB {who} 1f1b") for who in ("peer", "ours"))
    contenders = ["peer gpipe", "peer 1f1b", "ours gpipe", "ours 1f1b", "ours dapple pb"]
    assert names == ["naps", "bare", *(f"1 KB {name}" for name in contenders)]
    assert all(found[name].seconds >= sleeping.ideal(RANKS) for name in names[2:])
    assert peer == [16 * 1024, 16 * 1024]  # gradients on the first rank, activations on the last, of all micro-batches
    assert 0 < ours[1] < peer[1]


@pytest.mark.slow
def test_a_rank_that_fails_is_told_with_its_traceback():
    with Team(RANKS, Failing) as team, pytest.raises(SystemExit, match=r"(?s)rank 1 failed.*ValueError: of rank one"):
        team.ask("step")
    assert not any(process.is_alive() for process in team.processes)


@pytest.mark.parametrize(("value", "met"), [(1.05, "yes"), (1.07, "NO"), (None, "not measured")])
def test_a_line_says_whether_what_was_wanted_is_met(value, met):
    line = Line("a case", "s", 0.3, 0.4, 0.25, "at most 1.06", value, most=1.06)
    assert str(line).split() == [
        *("a", "case", "300.0", "ms", "400.0", "ms", "250.0", "ms", "1.200", "1.600", "1.333"),
        *("wanted:", "at", "most", "1.06:", *met.split()),
    ]
