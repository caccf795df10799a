"""Workers without what only Linux has: the same bits, the same failures named, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from ranks import Run, all_gone, env

HERE = Path(__file__).parent
SCRIPT = str(HERE / "elsewhere.py")


LAUNCH = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
if not os.environ.get("PENSTOCK_TEST_LINUX"):
    from elsewhere import take_away
    take_away()
from penstock.app.run.launcher import launch
sys.exit(launch(sys.argv[2:], int(sys.argv[1])))
"""


@contextmanager
def training(folder, ranks=2, linux="", **asked):
    """Programs that begin from nothing: in a forked rank, penstock would be loaded before."""
    rest = folder / "rest"
    rest.mkdir(parents=True)
    command = [sys.executable, "-c", LAUNCH, str(ranks), sys.executable, SCRIPT, json.dumps(asked)]
    run = Run(command, env(TMPDIR=rest, PENSTOCK_TEST_LINUX=linux), folder)
    try:
        yield run
    finally:
        run.end()


def left(folder):
    return [file.name for file in (folder / "rest").iterdir() if "penstock" in file.name]


@pytest.mark.parametrize("schedule", ["zb-h1", "2bw"])
def test_a_training_has_the_same_bits(tmp_path, schedule):
    found = {}
    for linux in ("", "1"):
        folder = tmp_path / f"linux{linux}"
        with training(folder, linux=linux, steps=4, schedule=schedule, file=str(folder / "found")) as run:
            assert run.wait() == 0, run.said
            assert run.said == ""
        found[linux] = [json.loads((folder / f"found.{rank}").read_text()) for rank in range(2)]
        assert left(folder) == []
    assert {rank["kinds"][0] for rank in found[""]} == {"gloo"}
    assert {rank["kinds"][0] for rank in found["1"]} == {"shared"}
    for other, linux in zip(found[""], found["1"], strict=True):
        assert other["losses"] == linux["losses"]
        assert other["mark"] == linux["mark"], "a digest of all weights"


def test_a_killed_rank_is_named_and_the_others_end(tmp_path):
    with training(tmp_path, steps=100_000) as run:
        pids = run.begun(2)
        time.sleep(0.5)
        os.kill(pids[1], signal.SIGKILL)
        all_gone([*pids.values()], 5.0)
        assert run.wait() == 128 + signal.SIGKILL
        assert re.search(r"rank 0 stops.*: rank 1 died .*stage 1.* without reporting an error", run.said), run.said
    assert left(tmp_path) == []


def test_a_killed_launcher_takes_its_workers_along(tmp_path):
    with training(tmp_path, steps=100_000) as run:
        pids = run.begun(2)
        os.kill(run.process.pid, signal.SIGKILL)
        all_gone([*pids.values()], 5.0)


ENDS = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(100)"


def test_the_launcher_itself(tmp_path):
    """Its files have names there, and are gone afterwards."""
    setting = env(TMPDIR=tmp_path)
    command = [sys.executable, "-c", LAUNCH, "2", sys.executable, "-c", ENDS]
    done = subprocess.run(command, env=setting, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert done.stderr == "penstock: rank 1 ended with code 3\n"
    assert list(tmp_path.iterdir()) == []
