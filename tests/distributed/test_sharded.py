"""Replicas that divide the optimizer's state and the gradients train to the weights of plain training."""

from __future__ import annotations

import json

import pytest
import sharded_rank

from ranks import launched


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of three ranks found of every case."""
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "saved").mkdir()
    with launched(folder, 3, str(folder / "found"), script=sharded_rank.__file__) as run:
        assert run.wait(600) == 0, run.said
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(3)]


@pytest.mark.parametrize("number", range(len(sharded_rank.CASES)), ids=lambda at: str(sharded_rank.CASES[at]))
def test_weights_are_those_of_plain_training(results, number):
    for one in results:
        assert one[number]["off"] < 1e-10


def test_a_replica_steps_its_share_of_every_parameter_and_keeps_no_more(results):
    for number, case in enumerate(sharded_rank.CASES):
        most = max(case["replicas"])
        here = [one[number] for one in results if one[number]["stepped"] < one[number]["whole"]]
        assert len(here) == most
        twice = sum(one["stepped"] for one in here) - here[0]["whole"]
        assert 0 <= twice < most  # the single number, in the stage that has it
        for one in here:  # rows are divided as evenly as can be: parameters have few here
            assert abs(one["stepped"] - one["whole"] / most) <= 0.2 * one["whole"]
            states = 1 if case.get("optimizer") == "momentum" else 2
            assert one["kept"] <= states * one["stepped"]


def test_checkpoints_hold_the_state_whole_for_any_other_division(results):
    for one in results:
        for found in one:
            here, whole, divided = found["nexts"]
            assert here == pytest.approx(whole, rel=1e-12)
            assert here == pytest.approx(divided, rel=1e-12)
