"""What has failed, and was caught on every rank, is over: the next pipeline on the same ranks trains undisturbed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ranks import all_gone, launched

SCRIPT = str(Path(__file__).parent / "again_rank.py")


def run(folder: Path, ranks: int, **asked) -> list[dict]:
    """What each rank has trained to, after the fault; and what it said of that."""
    asked["file"] = str(folder / "found")
    with launched(folder, ranks, json.dumps(asked), script=SCRIPT) as started:
        assert started.wait() == 0, started.said
        said = started.out.read_text()
    return [json.loads((folder / f"found.{rank}").read_text()) | {"said": said} for rank in range(ranks)]


@cache
def undisturbed(ranks: int, schedule: str) -> dict:
    with TemporaryDirectory() as folder:
        found = run(Path(folder), ranks, times=0, schedule=schedule)
    assert all(one == found[0] for one in found)
    return found[0]


FAULTS = [
    (2, {"fault": "loss", "times": 2}),
    (2, {"fault": "forward", "who": 0, "transport": "gloo"}),
    (2, {"fault": "backward", "who": 1, "schedule": "zb-h1"}),
    (2, {"fault": "update", "who": 0}),
    (2, {"fault": "iterator", "who": 1, "times": 2}),
    (2, {"fault": "construction", "who": 1}),
    (2, {"fault": "evaluation"}),
    (2, {"fault": "checkpoint"}),
    (2, {"fault": "forward", "who": 0, "schedule": "pipedream"}),
    (4, {"fault": "loss", "times": 2}),
    (4, {"fault": "backward", "who": 2, "schedule": "2bw"}),
    (4, {"fault": "iterator", "who": 0}),
]


@pytest.mark.parametrize(("ranks", "asked"), FAULTS, ids=lambda value: str(value).replace("'", ""))
def test_another_pipeline_after_a_fault_trains_as_if_nothing_had_been(tmp_path, ranks, asked):
    found = run(tmp_path, ranks, **asked)
    wanted = undisturbed(ranks, asked.get("schedule", "1f1b"))
    assert all(f"rank {rank} caught" in found[0]["said"] for rank in range(ranks))
    assert "UnicodeDecodeError" not in found[0]["said"]
    for one in found:
        assert (one["losses"], one["state"]) == (wanted["losses"], wanted["state"])


def test_a_pipeline_that_has_failed_on_ranks_says_so_and_trains_no_more(tmp_path):
    """With half a mini-batch in its transports it would train wrong, or wait for ever."""
    found = run(tmp_path, 2, fault="update", who=0)
    for rank, came in ((0, "AssertionError: no such luck"), (1, "RankError: rank 0 failed in ")):
        said = (
            f"rank {rank} caught InputError: expected a pipeline that can go on, but got one of which some stages may "
        )
        assert said in found[0]["said"]
        assert came in found[0]["said"]
    assert found[0]["said"].count("make another Pipeline") == 2


@pytest.mark.parametrize("ends", [0, 1])
def test_a_rank_that_ends_by_the_fault_is_not_waited_for(tmp_path, ends):
    """The others, which make another pipeline, are told at once."""
    asked = {"fault": "forward", "who": 1, "ends": ends, "file": str(tmp_path / "found")}
    with launched(tmp_path, 2, json.dumps(asked), script=SCRIPT) as started:
        pids = started.begun(2)
        assert started.wait() == 1
        all_gone([*pids.values()], 5)
        said = started.said
    assert "rank 1 failed in 1F1 (stage 1, micro-batch 1): ValueError: no such luck" in said
    assert not list(tmp_path.glob("found.*"))
