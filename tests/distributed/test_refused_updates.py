"""Ranks agree before an update: none applies one that another refuses, or does not live to make."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from ranks import launched

SCRIPT = str(Path(__file__).parent / "refused_rank.py")
WRONG = 2


def run(folder: Path, ranks: int, code: int = 0, **asked) -> tuple[list[dict], str]:
    folder.mkdir(exist_ok=True)
    asked["file"] = str(folder / "found")
    with launched(folder, ranks, json.dumps(asked), script=SCRIPT) as started:
        assert started.wait() == code, started.said
        said = started.said
    files = [folder / f"found.{rank}" for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files], said


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(("ranks", "who"), [(2, 0), (2, 1), (4, 1)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_no_rank_applies_an_update_that_one_refuses(tmp_path, ranks, who, schedule, value):
    """All raise the same error and go on, if their scripts catch it, as if the batch had never been."""
    if ranks == 4 and value == "inf":
        pytest.skip("four ranks are started for one value")
    found, _ = run(tmp_path / "wrong", ranks, what=value, who=who, schedule=schedule)
    wanted, _ = run(tmp_path / "left out", ranks, what="left out", who=-1, schedule=schedule)
    name = f"{2 * who if ranks == 4 else 4 * who}.weight"
    for one, plain in zip(found, wanted, strict=True):
        assert one["after"] == one["marks"][WRONG]
        assert one["error"] == found[0]["error"]
        assert one["losses"] == plain["losses"]
        assert one["marks"][-1] == plain["marks"][-1]
    assert f"finite gradients, but got {value} in 36 of 36 numbers of the gradient of {name}" in found[0]["error"]
    assert f"of stage {who} at step {WRONG}; nothing of this update was applied" in found[0]["error"]


def test_a_refused_update_that_nobody_catches_ends_the_run_with_one_message(tmp_path):
    found, said = run(tmp_path, 2, 1, what="nan", who=0, caught=False)
    assert found == [{}, {}]
    assert "expected finite gradients, but got nan in 36 of 36 numbers of the gradient of 0.weight of stage 0" in said
    assert said.count("Traceback (most recent") <= 1, said


@pytest.mark.parametrize("who", [0, 1])
def test_no_rank_applies_an_update_in_whose_backward_another_is_killed(tmp_path, who):
    found, _ = run(tmp_path, 2, 128 + signal.SIGKILL, what="kill", who=who)
    other = found[1 - who]
    assert other["error"].startswith(f"RankError: rank {who} died in {who}B3")
    assert other["after"] == other["marks"][WRONG]
    assert len(other["marks"]) == WRONG + 1


@pytest.mark.parametrize("what", ["nan", "kill"])
def test_without_a_flush_a_run_that_breaks_off_saves_nothing(tmp_path, what):
    """Survivors may be an update apart: a checkpoint of that would be of no mini-batch."""
    code = 128 + signal.SIGKILL if what == "kill" else 1
    found, _ = run(tmp_path, 2, code, what=what, who=0, schedule="pipedream")
    for one in found[1:] if what == "kill" else found:
        assert one["finite"]
        assert "a pipeline that can go on, but got one of which some stages may have an update" in one["refused"]
    assert not (tmp_path / "found.saved").exists()
    if what == "nan":
        assert "nan in 36 of 36 numbers of the gradient of 0.weight of stage 0 at step 2" in found[0]["error"]
