"""Replicas in a config: `penstock train`, `verify`, `profile` and `compare` start a worker for each, and say so."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from test_cli_train import SMALL, losses

from commands import environment, forked
from penstock.comm.world.host import cores


@pytest.fixture
def small(tmp_path):
    """A config with these lines in [pipeline] in place of its stages."""

    def written(*lines, **changes):
        text = SMALL.replace("stages = 2\n", "".join(f"{line}\n" for line in lines))
        for name, value in changes.items():
            text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
        file = tmp_path / "small.toml"
        file.write_text(text)
        return file

    return written


def equal(one, other):
    assert max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True)) < 1e-5


@pytest.mark.parametrize(
    ("lines", "workers"),
    [
        (["stages = 2", "replicas = [2, 1]"], 3),
        (["stages = 2", "replicas = 2", 'schedule = "zb-h1"'], 4),
        (["stages = 1", "replicas = 2"], 2),
    ],
    ids=["2:1", "2:2", "plain data parallelism"],
)
def test_training_starts_a_worker_for_each_replica(small, lines, workers):
    file = small(*lines)
    told = forked("train", file, "--steps", 6, "--json", ranks=workers)
    assert losses(told) == losses(forked("train", file, "--steps", 6, "--json", "--inline"))
    assert len(json.loads(told.stdout)["memory"]) == workers
    equal(losses(told), losses(forked("train", small("stages = 1"), "--steps", 6, "--json")))


def test_training_with_replicas_ends_in_a_table_and_a_report(small, tmp_path):
    file = small("stages = 2", "replicas = [2, 1]")
    done = forked("train", file, "--steps", 4, "--report", tmp_path / "run.html", ranks=3)
    assert done.returncode == 0, done.stderr
    assert "3 workers" in done.stdout
    page = (tmp_path / "run.html").read_text()
    assert "predicted from the steps before" in page
    assert "rank 0.1" in page
    assert "reduction over replicas" in page


def test_the_same_config_under_torchrun(small):
    file = small("stages = 2", "replicas = [1, 2]")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m"]
    words += ["penstock.cli", "train", str(file), "--steps", "3", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment())
    assert losses(done) == losses(forked("train", file, "--steps", 3, "--json", "--inline"))


def test_verify_has_one_line_for_a_stage_with_replicas(small):
    file = small("stages = 2", "replicas = [2, 1]")
    for more, ranks in (((), 3), (("--inline",), 0)):
        done = forked("verify", file, "--steps", 2, "--json", *more, ranks=ranks)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["ok"]
        assert [stage["stage"] for stage in told["stages"]] == [0, 1]
        assert all(stage["gradient"]["relative"] < 1e-12 for stage in told["stages"])


def test_profile_measures_in_as_many_processes(small):
    done = forked("profile", small("stages = 1", "replicas = 2"), "--repetitions", 2, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout + done.stderr


@pytest.mark.skipif(cores() < 2, reason="fewer cores than workers")
def test_compare_measures_plain_data_parallelism_on_workers(small):
    file = small("stages = 1", "replicas = 2", steps=6)
    done = forked("compare", file, "--methods", "plain,1f1b", "--json", ranks=3)  # one of them the plain process
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["replicas"] == [2]
    plain, own = told["methods"]
    equal(own["losses"], plain["losses"])
    assert told["clock"] == "measured on 2 workers"
    assert own["memory"]["weights"] == plain["memory"]["weights"]


def test_replicas_that_are_wrong_are_refused_once_before_workers_start(small):
    done = forked("train", small("stages = 2", "replicas = [2]"))
    assert (done.returncode, done.stdout) == (2, "")
    said = (
        "pipeline.replicas: expected a positive replica count for each of 2 ranks, but got [2]; give one number a rank"
    )
    assert done.stderr.count(said) == 1


def test_a_plan_with_replicas_takes_the_place_of_the_configs(small, tmp_path):
    """From the profile of the config, by the planner that replicates, to as many workers as it has devices."""
    file, profile, cluster = small("stages = 2", "replicas = 2"), tmp_path / "p.json", tmp_path / "c.toml"
    cluster.write_text("devices = 3\n[inside]\nbandwidth = 64e9\n")
    assert forked("profile", file, "-o", profile, "--busy", 1, "--repetitions", 2).returncode == 0
    words = ("plan", "--profile", profile, "--cluster", cluster, "--method", "dapple", "--batch", 16, "--json")
    planned = forked(*words)
    assert planned.returncode == 0, planned.stderr
    told = json.loads(planned.stdout)
    assert told["trainable"]
    (tmp_path / "plan.json").write_text(planned.stdout)
    workers = sum(stage["replicas"] for stage in told["stages"])
    assert workers == 3
    more = ("--plan", tmp_path / "plan.json", "--steps", 3, "--json")
    done = forked("train", file, *more, ranks=workers)
    assert losses(done) == losses(forked("train", file, *more, "--inline"))
    assert len(json.loads(done.stdout)["memory"]) == workers
