"""Checkpoints of workers: saved by two stages, loaded by one, three and four; ranks that die or cannot write."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from checkpoints import conv, differences, gpt, listing, pictures, state, steps
from ranks import PATIENCE, all_gone, env, launched

torch.set_num_threads(1)
SCRIPT = str(Path(__file__).parent / "checkpoint_rank.py")


class Outcome:
    """What the ranks of a run have left."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.said = [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(size)]

    @property
    def losses(self) -> list[float]:
        assert all(said["losses"] == self.said[0]["losses"] for said in self.said)
        return self.said[0]["losses"]

    def state(self, name: str) -> dict:
        """All ranks' together."""
        return {
            key: value
            for rank in range(self.size)
            for key, value in torch.load(self.folder / f"{name}-{rank}.pt", weights_only=True).items()
        }


def workers(folder: Path, size: int, *actions: str, kind: str = "gpt", stages: int | None = None, **options) -> Outcome:
    """Train by so many processes, under penstock's launcher."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [str(folder), kind, str(stages or size), json.dumps(options), *actions]
    with launched(folder, size, *words, script=SCRIPT) as run:
        assert run.wait() == 0, run.said
        assert "Warning" not in run.said
    return Outcome(folder, size)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By two workers after three steps: the path, the state then, and the losses of two more steps."""
    folder = tmp_path_factory.mktemp("saved")
    path = folder / "step-3"
    done = workers(folder / "out", 2, "random:", "step:3", f"save:{path}", "state:then", "draw:", "step:2")
    assert listing(path) == [".metadata", "__0_0.distcp", "__1_0.distcp", "penstock.json"]
    assert listing(folder) == ["out", "step-3"]
    return path, done.state("then"), done.losses[3:], [said["drawn"] for said in done.said]


def reference(path: Path) -> list[float]:
    """What two stages without dropout go on with: dropout depends on the stage."""
    pipe = gpt(2, dropout=0.0)
    pipe.load(path)
    return steps(pipe, 3)


class TestSavedByTwo:
    def test_each_rank_has_written_its_own(self, saved):
        tensors = json.loads((saved[0] / "penstock.json").read_text())["facts"]["tensors"]
        assert tensors["model.tokens.weight"]["file"] == "__0_0.distcp"
        assert tensors["model.norm.weight"]["file"] == "__1_0.distcp"
        assert not any(name.startswith("model.head") for name in tensors)  # the same weight as the tokens'
        assert {name for name in tensors if name.startswith("model.")} == {
            f"model.{name}" for name, _ in gpt(1).model.named_parameters()
        }

    def test_loaded_by_one(self, saved):
        pipe = gpt(1, dropout=0.0)
        pipe.load(saved[0])
        assert not differences(state(pipe), saved[1])
        losses, wanted = steps(pipe, 3), reference(saved[0])
        assert losses[0] == wanted[0]
        assert losses == pytest.approx(wanted, rel=1e-6)

    @pytest.mark.parametrize("size", [3, 4])
    def test_loaded_by(self, saved, size, tmp_path):
        done = workers(tmp_path, size, f"load:{saved[0]}", "draw:", "state:then", "step:3", dropout=0.0)
        assert not differences(done.state("then"), saved[1])
        drawn = [said["drawn"] for said in done.said]
        assert drawn == [*saved[3], *[saved[3][0]] * (size - 2)]  # ranks that were not there take the first one's
        wanted = reference(saved[0])
        assert done.losses[0] == wanted[0]
        assert done.losses == pytest.approx(wanted, rel=1e-6)

    def test_loaded_by_two_under_torchrun_goes_on_with_the_same_bits(self, saved, tmp_path):
        path, before, losses, drawn = saved
        out, again = tmp_path / "out", tmp_path / "again"
        out.mkdir()
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
        words += [
            str(out),
            "gpt",
            "2",
            "{}",
            f"load:{path}",
            "draw:",
            "state:then",
            "step:2",
            f"save:{again}",
            "state:end",
        ]
        ended = subprocess.run(words, env=env(), capture_output=True, text=True, timeout=PATIENCE)
        assert ended.returncode == 0, ended.stderr
        done = Outcome(out, 2)
        assert not differences(done.state("then"), before)
        assert done.losses == losses
        assert [said["drawn"] for said in done.said] == drawn  # the users' random states, each rank's own
        assert drawn[0] != drawn[1]
        inline = gpt(2)
        inline.load(path)
        assert steps(inline, 2) == losses
        assert not differences(state(inline), done.state("end"))
        inline.load(again)  # saved by ranks that had loaded
        assert not differences(state(inline), done.state("end"))

    def test_loaded_by_two_chunks_on_each_of_two(self, saved, tmp_path):
        how = {"schedule": "interleaved", "chunks": 2, "dropout": 0.0}
        done = workers(tmp_path, 2, f"load:{saved[0]}", "state:then", "step:3", "evaluate:", **how)
        assert not differences(done.state("then"), saved[1])
        assert done.losses[:3] == pytest.approx(reference(saved[0]), rel=1e-6)


def test_saved_by_one_process_and_loaded_by_workers_and_back(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    pipe = gpt(3)
    steps(pipe, 2)
    pipe.save(first)
    before = state(pipe)
    done = workers(tmp_path / "out", 2, f"load:{first}", "state:then", "step:1", f"save:{second}", "state:end")
    assert not differences(done.state("then"), before)
    pipe.load(second)
    assert not differences(state(pipe), done.state("end"))


def test_batch_norms(tmp_path):
    path = tmp_path / "a"
    done = workers(tmp_path / "2", 2, "step:3", f"save:{path}", "state:then", "step:2", kind="conv")
    assert any(name.endswith("running_mean") for name in done.state("then"))
    more = workers(tmp_path / "3", 3, f"load:{path}", "state:then", "step:2", kind="conv")
    assert not differences(more.state("then"), done.state("then"))
    assert more.losses == done.losses[3:]
    alone = conv(1)
    alone.load(path)
    assert not differences(state(alone), done.state("then"))
    assert steps(alone, 2, pictures) == done.losses[3:]


class TestKilled:
    """A rank that is killed while saving leaves the old checkpoint whole, and no half one under the final name."""

    @pytest.mark.parametrize(
        "where",
        ["1,fsync,1", "0,fsync,1", "0,rename,2"],
        ids=["rank 1 writes", "rank 0 writes", "all is written but the name"],
    )
    def test_leaves_the_old_one(self, where, tmp_path):
        old, new = tmp_path / "old", tmp_path / "new"
        actions = ["step:1", f"save:{old}", "state:then", "step:1", f"die:{where}", f"save:{new}", "step:1"]
        out = tmp_path / "out"
        with launched(out, 2, str(out), "gpt", "2", "{}", *actions, script=SCRIPT) as run:
            pids = run.begun(2)
            assert run.wait() != 0
            all_gone(list(pids.values()), 5.0)
        assert re.search(rf"rank {where[0]} .*(died|signal 9)", run.said), run.said
        assert not new.exists()
        left = [name for name in listing(tmp_path) if name not in ("old", "out")]
        assert all(name.startswith("new.tmp-") for name in left)
        assert where[0] == "0" or not left  # the first rank clears up, if it lives
        pipe = gpt(2)
        pipe.load(old)
        assert not differences(state(pipe), _state(out, "then"))


def _state(folder: Path, name: str) -> dict:
    return {
        key: value
        for rank in range(2)
        for key, value in torch.load(folder / f"{name}-{rank}.pt", weights_only=True).items()
    }


class TestRefused:
    """All ranks say the same, nothing is left behind, and training goes on as if nobody had tried."""

    def errors(self, saved, folder: Path, *actions: str) -> list[str]:
        good = folder / "good"
        done = workers(folder / "out", 2, f"load:{saved[0]}", *actions, "step:2", f"save:{good}")
        assert done.losses == saved[2]
        assert done.said[0]["errors"] == done.said[1]["errors"]
        assert (good / "penstock.json").is_file()
        return done.said[0]["errors"]

    def test_what_cannot_be_written(self, saved, tmp_path):
        (tmp_path / "file").write_text("")
        said = self.errors(
            saved,
            tmp_path,
            "limit:9000",
            f"try:{tmp_path / 'a'}",
            "unlimit:",
            f"try:{saved[0]}",
            f"try:{tmp_path / 'file/a'}",
        )
        assert "on rank 1 OSError: [Errno 27] File too large" in said[0]
        assert "training can go on" in said[0]
        assert "which exists; nothing is overwritten" in said[1]
        assert "on rank 0 " in said[2]
        assert "Not a directory" in said[2] or "File exists" in said[2]
        assert listing(tmp_path) == ["file", "good", "out"]

    @pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")
    def test_disks_that_are_full_or_read_only(self, saved, tmp_path):
        with mounted(tmp_path / "full", "size=100k") as full, mounted(tmp_path / "fixed", "ro,size=100k") as fixed:
            said = self.errors(saved, tmp_path, f"try:{full / 'a'}", f"try:{fixed / 'a'}")
            assert listing(full) == []
        assert "OSError: [Errno 28] No space left on device" in said[0]
        assert re.search(r"on rank 0 OSError: \[Errno 30\] Read-only file system: .*fixed/a\.tmp-", said[1])
        assert all("training can go on" in one for one in said)

    def test_what_cannot_be_read(self, saved, tmp_path):
        """The damaged file is the second rank's: the first would have all it needs."""
        other = tmp_path / "other"
        conv(2).save(other)
        copy = tmp_path / "copy"
        copy.mkdir()
        for file in saved[0].iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        data = bytearray((copy / "__1_0.distcp").read_bytes())
        data[data.index(saved[1]["norm.weight"].numpy().tobytes())] ^= 1
        (copy / "__1_0.distcp").write_bytes(bytes(data))
        said = self.errors(saved, tmp_path, f"refuse:{copy}", f"refuse:{other}", f"refuse:{tmp_path / 'none'}")
        assert "__1_0.distcp: expected model.norm.weight as it was written, but got on rank 1 other values" in said[0]
        assert re.search(r"a checkpoint of this model, but got missing blocks\.0.*unknown 0\.weight", said[1])
        assert "none/penstock.json: expected a checkpoint, but got nothing there" in said[2]


@contextmanager
def mounted(folder: Path, options: str):
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
