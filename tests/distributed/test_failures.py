"""A pipeline in training: whatever happens to one rank, all end in time, and say which one, where and why."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from ranks import Run, all_gone, env, launched

SCRIPT = str(Path(__file__).parent / "train_rank.py")
LIMIT = 5.0  # seconds in which all have to end
PLACE = r"\d+([FBIW]\d+(@\d+)?([<>]\d+)? \(stage \d+, micro-batch \d+\)|U@\d+ \(stage \d+\))"


def shm() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def training(folder: Path, ranks: int, **asked):
    return launched(folder, ranks, json.dumps(asked), script=SCRIPT)


def test_killed_at_a_random_action_twenty_times(tmp_path):
    before, dice = shm(), random.Random(11)
    for attempt in range(20):
        ranks, method = dice.choice([2, 3]), dice.choice(["1f1b", "zb-h1", "pipedream", "2bw", "pipemare"])
        victim = dice.randrange(ranks)
        with training(tmp_path / str(attempt), ranks, steps=100_000, schedule=method) as run:
            pids = run.begun(ranks)
            time.sleep(dice.random() * 0.6)
            os.kill(pids[victim], signal.SIGKILL)
            all_gone([*pids.values()], LIMIT)
            assert run.wait() == 128 + signal.SIGKILL
            assert f"rank {victim} ended by signal 9 (SIGKILL), possibly out of memory" in run.said
            where = rf"(in {PLACE}|between two steps, after {PLACE}|before its first step \(stage {victim}\))"
            assert re.search(rf"rank \d stops.*: rank {victim} died {where} without reporting an error", run.said), (
                run.said
            )
            assert re.search(
                rf"penstock: rank {victim} ended by signal 9 .*possibly out of memory, {where}\n", run.said
            )
            assert "Traceback" not in run.said, run.said
    assert shm() == before


def test_under_torchrun_the_place_of_a_killed_rank_is_told_too(tmp_path):
    """Its agent ends the others as soon as it sees the death: they have to be quick."""
    dice = random.Random(5)
    for attempt in range(3):
        victim, asked = dice.randrange(2), {"steps": 100_000, "schedule": dice.choice(["1f1b", "2bw"])}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        run = Run([*command, SCRIPT, json.dumps(asked)], env(), tmp_path / str(attempt))
        try:
            pids = run.begun(2)
            time.sleep(dice.random() * 0.6)
            os.kill(pids[victim], signal.SIGKILL)
            all_gone([*pids.values()], LIMIT)
            assert run.wait() != 0
            where = rf"(in {PLACE}|between two steps, after {PLACE}|before its first step \(stage {victim}\))"
            assert re.search(
                rf"rank {1 - victim} stops: rank {victim} died {where} without reporting an error", run.said
            ), run.said
            assert f"rank      : {victim} (local_rank" in run.said.split("Root Cause")[1], run.said
        finally:
            run.end()


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("call", [1, 7])
def test_an_exception_on_each_stage_shows_its_traceback_first(tmp_path, who, call):
    """At the first call others wait to begin, at the seventh they compute, send and wait."""
    began = time.monotonic()
    with training(tmp_path, 3, who=who, odd="raise", call=call, steps=50) as run:
        assert run.wait() == 1
        place = rf"{who}F\d+ \(stage {who}, micro-batch \d+\)"
        assert re.search(rf"rank {who} failed in {place}: ValueError: no such luck", run.said), run.said
        assert run.said.startswith("Traceback (most recent call last):\n"), run.said
        assert run.said.count("Traceback (most recent") == 1, run.said
        assert 'raise ValueError("no such luck")' in run.said
    assert time.monotonic() - began < 100


def _ended(run: Run, pids: dict[int, int]) -> None:
    all_gone([*pids.values()], LIMIT)
    run.wait(10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_all_in_time(tmp_path, number):
    before = shm()
    with training(tmp_path, 2, steps=100_000) as run:
        pids = run.begun(2)
        time.sleep(0.5)
        os.kill(run.process.pid, number)
        _ended(run, pids)
        assert run.process.returncode == 128 + number
    assert shm() == before


def test_a_killed_launcher_takes_its_workers_along(tmp_path):
    with training(tmp_path, 2, steps=100_000) as run:
        pids = run.begun(2)
        os.kill(run.process.pid, signal.SIGKILL)
        all_gone([*pids.values()], LIMIT)


def test_a_stopped_rank_is_found_and_the_report_says_who_waits_for_whom(tmp_path):
    with training(tmp_path, 3, who=1, odd="stop", call=6, steps=50, timeout=2) as run:
        pids = run.begun(3)
        assert run.wait() != 0
        all_gone([*pids.values()], LIMIT)
        assert "rank 1" in run.said
        assert re.search(r"waits? for rank 1", run.said), run.said


def test_a_slow_rank_is_waited_for(tmp_path):
    with training(tmp_path, 2, who=1, odd="slow", call=2, steps=2, timeout=30) as run:
        assert run.wait() == 0, run.said


def test_a_finished_run_exits_0_and_leaves_nothing(tmp_path):
    before = shm()
    for attempt in range(5):
        with training(tmp_path / str(attempt), 2, steps=2) as run:
            pids = run.begun(2)
            assert run.wait() == 0, run.said
            assert run.said == ""
            all_gone([*pids.values()], LIMIT)
    assert shm() == before
