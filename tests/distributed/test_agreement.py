"""Ranks that were told different things find out before they train wrong; those that were told the same agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hosts import Ranks, can_make_hosts, two_hosts

from ranks import launched

SCRIPT = str(Path(__file__).parent / "train_rank.py")


def result(folder: Path, ranks: int, **asked) -> list[dict]:
    asked["file"] = str(folder / "found")
    with launched(folder, ranks, json.dumps(asked), script=SCRIPT) as run:
        assert run.wait() == 0, run.said
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(ranks)]


def refusal(folder: Path, ranks: int, **asked) -> str:
    with launched(folder, ranks, json.dumps(asked), script=SCRIPT) as run:
        assert run.wait() == 1, run.said
    return run.said


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ("model", "expected the same model on every rank, but got GPT of"),
        ("schedule", "expected the same schedule on every rank, but got 1f1b of"),
        ("data", "expected the same batch on every rank, but got different ones"),
    ],
)
def test_ranks_that_disagree(tmp_path, odd, message):
    said = refusal(tmp_path, 2, who=1, odd=odd, steps=2)
    assert message in said
    assert said.count("Traceback (most recent") <= 1, said


@pytest.mark.parametrize("stages", [3, 4])
def test_a_world_size_that_does_not_fit_the_plan(tmp_path, stages):
    said = refusal(tmp_path, 2, stages=stages)
    assert f"expected {stages} processes for a pipeline of {stages} ranks, but got 2" in said
    assert "--nproc-per-node" in said


def test_models_of_different_seeds_become_rank_0s(tmp_path):
    wanted = result(tmp_path / "alike", 2)
    found = result(tmp_path / "apart", 2, who=1, odd="seed")
    assert found == wanted


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 3), ("gpipe", 2), ("zb-h1", 3)])
def test_the_loss_is_the_same_on_every_rank_and_nobody_meets_for_it(tmp_path, schedule, ranks):
    """It goes along with the last backward."""
    found = result(tmp_path, ranks, schedule=schedule)
    assert all(one == found[0] for one in found)
    assert len(set(found[0]["losses"])) == 3
    assert found[0]["met"] == 0


def test_data_on_rank_0_alone_trains_the_same_and_all_ranks_get_the_same_losses(tmp_path):
    every = result(tmp_path / "every", 2)
    alone = result(tmp_path / "alone", 2, data="rank0")
    for one in (*every, *alone):
        del one["met"]  # batches from rank 0 are handed out by meeting
    assert every[0] == every[1] == alone[0] == alone[1]
    assert every[0]["kinds"] == ["shared"]


@pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces")
def test_two_hosts_train_the_same_bits_and_share_no_memory(tmp_path):
    wanted = result(tmp_path / "one", 4)[0]
    with two_hosts() as (first, second), Ranks() as ranks:
        asked = {"file": str(tmp_path / "found")}
        ranks.start([SCRIPT, json.dumps(asked)], [first, first, second, second])
        done = ranks.wait(200)
        assert [rank.code for rank in done] == [0] * 4, "\n".join(rank.error for rank in done)
    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(4)]
    assert all((one["losses"], one["mark"]) == (wanted["losses"], wanted["mark"]) for one in found)
    near, between = ["shared"], ["gloo", "shared"]
    assert [one["kinds"] for one in found] == [between, between, between, between] or [
        one["kinds"] for one in found
    ] == [between, between, between, near]
