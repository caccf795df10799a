"""Disks that are full and outputs that nobody takes: a training goes on, says so once, and its exit code tells."""

from __future__ import annotations

import json
import os
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkpoints import gpt, listing
from commands import MODULE, environment, forked
from penstock.app.run.checkpoints import PeriodicCheckpoints

WORKERS = {"ranks": 2}
SMALL = """
[model]
kind = "gpt"
width = 16
heads = 2
layers = 4
length = 16
[pipeline]
stages = 2
microbatches = 4
[training]
steps = 6
batch = 16
log_every = 1
plain_steps = 0
checkpoint = "{}"
checkpoint_every = {}
"""


@contextmanager
def mounted(folder: Path, options: str):
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("flags", [("--inline",), ()], ids=["one process", "workers"])
def test_a_full_disk_costs_checkpoints_and_no_training(flags, tmp_path):
    config = tmp_path / "small.toml"
    config.write_text(SMALL.format(tmp_path / "kept", 2))
    good = forked("train", config, "--json", *flags, **WORKERS)
    assert good.returncode == 0, good.stderr
    assert listing(tmp_path / "kept") == ["step-2", "step-4", "step-6"]
    room = size(tmp_path / "kept" / "step-2") * 3 // 2
    with mounted(tmp_path / "full", f"size={room}") as full:
        config.write_text(SMALL.format(full / "kept", 2))
        done = forked("train", config, "--json", *flags, **WORKERS)
        assert listing(full / "kept") == ["step-2"]  # nothing half beside it
        config.write_text(SMALL.format(tmp_path / "more", 2) + f'resume = "{full / "kept" / "step-2"}"\n')
        again = forked("train", config, "--json", *flags, **WORKERS)
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert told["losses"] == json.loads(good.stdout)["losses"]
    assert [Path(path).name for path in told["unsaved"]] == ["step-4", "step-6"]
    for step in (4, 6):
        assert (
            len(re.findall(rf"penstock: no checkpoint after step {step}: .*No space left on device", done.stderr)) == 1
        )
    assert "the last one is " + str(full / "kept" / "step-2") in done.stderr
    assert "2 checkpoints are missing" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(again.stdout)["losses"] == told["losses"][2:]


def test_a_save_that_fails_once_is_followed_by_others(tmp_path, capsys):
    pipe = gpt(2)
    keep = PeriodicCheckpoints(pipe, str(tmp_path), 1, 3)
    keep.require_room()
    (tmp_path / "step-1").mkdir()  # of somebody else
    pipe.index = 1
    keep.after(1)
    pipe.index = 2
    keep.after(2)
    assert keep.failed == [str(tmp_path / "step-1")]
    assert keep.last == str(tmp_path / "step-2")
    said = capsys.readouterr().err
    assert said.startswith("penstock: no checkpoint after step 1: expected a path where nothing is yet")
    assert said.endswith("there is none of this run yet\n")


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(SMALL.format(tmp_path / "kept", 6))
    return file


def started(config: Path, flags: tuple[str, ...], **streams: object) -> subprocess.Popen[str]:
    words = [*MODULE, "train", str(config), *flags]
    return subprocess.Popen(words, text=True, env=environment(), **{"stderr": subprocess.PIPE, **streams})


@pytest.mark.parametrize("flags", [("--inline",), ()], ids=["one process", "workers"])
class TestOutputs:
    def test_a_reader_that_leaves(self, config, flags):
        run = started(config, flags, stdout=subprocess.PIPE)
        assert run.stdout.readline().startswith("step 1/6")
        run.stdout.close()
        self.went_on(run, config, "standard output cannot be written to (Broken pipe)")

    @pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
    def test_a_file_on_a_full_disk(self, config, flags, more):
        with Path("/dev/full").open("w") as full:
            run = started(config, (*flags, *more), stdout=full)
        self.went_on(run, config, "standard output cannot be written to (No space left on device)")

    def test_one_that_was_closed_beforehand_leads_nowhere(self, config, flags):
        """The next file that is opened would else be standard output."""
        words = " ".join([*MODULE, "train", str(config), *flags])
        shell = ["/bin/sh", "-c", f"exec {words} >&-"]
        done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, env=environment(), timeout=200)
        assert (done.returncode, done.stderr) == (0, "")
        assert listing(config.parent / "kept") == ["step-6"]

    def went_on(self, run: subprocess.Popen[str], config: Path, said: str) -> None:
        with run:
            err = run.stderr.read()
            assert run.wait(200) == 1, err
        lines = [line for line in err.splitlines() if line.startswith("penstock: ") and "ended with code" not in line]
        assert lines == [f"penstock: {said}; the training goes on without it"]
        assert not re.search("Traceback|Exception ignored", err)
        assert listing(config.parent / "kept") == ["step-6"]


@pytest.mark.parametrize("words", [["schedules"], ["simulate", "--schedule", "1f1b", "-p", "4", "-m", "8"]])
def test_results_that_nobody_can_take_are_one_message(words):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*MODULE, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 2
    assert (
        done.stderr == "penstock: expected an output that can be written, but got No space left on device; check it\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_report_that_cannot_be_written_in_the_end(config, tmp_path):
    with mounted(tmp_path / "full", "size=4k") as full:
        done = forked("train", config, "--report", full / "run.html", **WORKERS)
        said = f"penstock: the report {full / 'run.html'} could not be written: No space left on device\n"
    assert done.returncode == 1
    assert done.stderr.count(said) == 1
    assert "Traceback" not in done.stderr
    assert "6 steps" in done.stdout
