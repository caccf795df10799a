"""Lanes over gloo between real processes; what each rank does is in gloo_ranks.py."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from distributed.hosts import HERE, Ranks, run

SCRIPT = str(Path(__file__).with_name("gloo_ranks.py"))


def play(scenario: str, ranks: int, folder: Path, fork: bool = True) -> list[str]:
    """What the ranks print. All exit with 0."""
    ended = run([SCRIPT, scenario, str(folder / "store")], [HERE] * ranks, fork=fork)
    assert all(rank.error == "" for rank in ended), [rank.error for rank in ended]
    assert all(rank.out.endswith("done\n") for rank in ended)
    return [rank.out for rank in ended]


def test_types_shapes_and_strides_in_any_order(tmp_path):
    play("round_trips", 3, tmp_path)


def test_thousands_of_messages_between_four_ranks_at_once(tmp_path):
    play("stress", 4, tmp_path)


def test_large_messages_both_ways_block_nobody_and_do_not_pile_up(tmp_path):
    play("large_in_both_directions", 2, tmp_path)


def test_memory_is_kept_for_what_is_in_flight_only(tmp_path):
    play("memory_is_let_go", 2, tmp_path)


def test_a_wait_asks_how_the_others_are_and_can_be_given_up(tmp_path):
    play("silent", 2, tmp_path)


def test_a_wait_on_a_closed_lane_ends_at_once(tmp_path):
    play("ended", 2, tmp_path)


def test_a_killed_peer_is_noticed_and_the_survivors_exit_by_themselves(tmp_path):
    with Ranks() as ranks:
        ranks.start([SCRIPT, "killed", str(tmp_path / "store")], [HERE] * 4)
        ended = ranks.wait(60)
    assert [rank.code for rank in ended] == [3, -9, 3, 3], [rank.error for rank in ended]
    for rank in (0, 2, 3):
        assert float(ended[rank].out.split()[-1]) < 2
        assert ended[rank].error == ""


@pytest.mark.parametrize("scenario", ["leave", "leave_without_closing", "leave_at_other_times"])
def test_a_finished_run_exits_with_0(scenario, tmp_path):
    play(scenario, 3, tmp_path)


@pytest.mark.slow
def test_a_finished_run_exits_with_0_again_and_again(tmp_path):
    for number in range(10):
        (tmp_path / str(number)).mkdir()
        play(("leave", "leave_at_other_times")[number % 2], 2, tmp_path / str(number), fork=number > 1)
        time.sleep(0.01)
