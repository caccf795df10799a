"""Directories of saves that were interrupted: removed by the next one, and by no one while their owner lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from checkpoints import gpt, listing
from penstock.app.run.checkpoints import PeriodicCheckpoints
from penstock.training.checkpoint.atomic import Unfinished, clean

HOLD = """
import sys, time
from pathlib import Path
from penstock.training.checkpoint.atomic import Unfinished
held = Unfinished(Path(sys.argv[1]))
(held.path / "__0_0.distcp").write_text("half")
print(held.path.name, flush=True)
time.sleep(600)
"""
pytestmark = pytest.mark.cpu_only  # the helpers make their batches in host memory


@pytest.fixture
def other(tmp_path):
    """Another process in the midst of a save, and the name of its directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "step-1")], stdout=subprocess.PIPE, text=True
    )
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("how", ["save", "export", "start"])
def test_what_a_killed_one_has_left_goes(how, other, tmp_path):
    process, name = other
    pipe, act = gpt(2), {}
    act["save"] = lambda: pipe.save(tmp_path / "step-2")
    act["export"] = lambda: pipe.export(tmp_path / "a.safetensors")
    act["start"] = lambda: PeriodicCheckpoints(pipe, str(tmp_path), 1, 3).require_room()
    os.kill(process.pid, signal.SIGSTOP)  # alive, however slow
    act["start"]()
    assert listing(tmp_path) == [name]
    process.kill()
    process.wait()
    act[how]()
    assert name not in listing(tmp_path)
    assert not any(".tmp-" in entry for entry in listing(tmp_path))


def test_what_is_not_ours_stays(tmp_path):
    mine = Unfinished(tmp_path / "a")
    name = mine.path.name
    mine.drop()
    host = name.removeprefix("a.tmp-").split("-")[0]
    others = [
        f"a.tmp-{host}-1234567",
        f"a.tmp-{host}-12345678.bak",
        "a.tmp-00000000-12345678",
        f"b.tmp-{host}-0000000g",
    ]
    for entry in others:
        (tmp_path / entry).mkdir()
    full = tmp_path / f"mine.tmp-{host}-12345678"  # named like one, with something else in it
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"link.tmp-{host}-12345678").symlink_to(elsewhere)
    (tmp_path / f"file.tmp-{host}-12345678").write_text("mine")
    before = listing(tmp_path)
    clean(tmp_path)
    assert listing(tmp_path) == before
    (full / "notes.txt").unlink()
    clean(tmp_path)
    assert listing(tmp_path) == [entry for entry in before if entry != full.name]


def test_a_directory_that_is_taken_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """Somebody who clears up may come between."""
    real, taken = os.open, []

    def open_late(path, *args, **kwargs):
        if ".tmp-" in str(path) and not taken:
            taken.append(path)
            path.rmdir()
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_late)
    held = Unfinished(tmp_path / "a")
    assert taken
    assert listing(tmp_path) == [held.path.name]
    clean(tmp_path)
    assert listing(tmp_path) == [held.path.name]
    held.drop()
    assert listing(tmp_path) == []
