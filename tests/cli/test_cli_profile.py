"""`penstock profile` as a person uses it: from a config to a file that plans and predicts."""

from __future__ import annotations

import json

import pytest
from test_cli_train import SMALL

from commands import forked, penstock
from penstock import Profile

NAMES = ["tokens", "places", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]


@pytest.fixture
def small(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return file


def test_two_processes_measure_and_the_file_is_planned_from(small, tmp_path):
    done = forked("profile", small, "-o", tmp_path / "new" / "p.json", "--repetitions", 1, ranks=2)
    assert done.returncode == 0, done.stderr
    found = Profile.from_json(json.loads((tmp_path / "new" / "p.json").read_text()))
    assert [layer.name for layer in found.layers] == NAMES
    assert (found.samples, found.busy, found.repetitions) == (4, 2, 1)
    for words in ("a micro-batch of 4 rows on", *NAMES, "beside its layers", "2 processes at a time", "disturbed by"):
        assert words in done.stdout
    assert "measuring layers" in done.stderr
    (tmp_path / "two.toml").write_text(
        "hosts = 1\ndevices = 2\n[kinds.core]\nmemory = 1e9\n[inside]\nbandwidth = 1e9\n"
    )
    given = ("--profile", tmp_path / "new" / "p.json", "--cluster", tmp_path / "two.toml")
    planned = penstock("plan", *given, "--method", "balance", "--batch", 16, "--json")
    assert planned.returncode == 0, planned.stderr
    told = json.loads(planned.stdout)
    assert told["step_seconds"] > 4 * max(layer.seconds for layer in found.layers)
    searched = penstock("plan", *given, "--batch", 16, "--replicas", 1, "--json")
    assert searched.returncode == 0, searched.stderr
    (tmp_path / "plan.json").write_text(searched.stdout)
    by_plan = SMALL.replace("stages = 2\nmicrobatches = 4", 'plan = "plan.json"')
    (tmp_path / "planned.toml").write_text(by_plan)
    trained = forked("train", "planned.toml", "--steps", 2, "--json", "--inline", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert len(json.loads(trained.stdout)["losses"]) == 2


def test_json_on_the_terminal_from_one_process(small):
    done = forked("profile", small, "--repetitions", 1, "--busy", 1, "--json", ranks=1)
    assert done.returncode == 0, done.stderr
    found = Profile.from_json(json.loads(done.stdout))
    assert [layer.name for layer in found.layers] == NAMES
    assert found.busy == 1
    blocks = found.layers[2:6]
    assert len({layer.parameter_bytes for layer in blocks}) == len({layer.kept_bytes for layer in blocks}) == 1
    assert all(layer.optimizer_bytes > 2 * layer.parameter_bytes for layer in blocks)
    assert "middle half of 1 samples" in done.stderr


def refused(*arguments):
    done = forked("profile", *arguments, ranks=2)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr


def test_bad_input_gets_one_message(small, tmp_path):
    (tmp_path / "file").write_text("")
    said = refused(small, "-o", tmp_path / "file" / "p.json")
    assert "expected a profile that can be written" in said
    assert "measuring" not in said  # found out before, not after
    small.write_text(SMALL.replace("lr = 1e-2", 'lr = "fast"'))
    assert refused(small, "-o", tmp_path / "p.json").count("penstock:") == 1
    assert not (tmp_path / "p.json").exists()


def test_a_fault_that_workers_find_is_said_once(tmp_path):
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def model(): return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))\n"
        "def data():\n    while True: yield torch.ones(8, 4), torch.ones(8, 4)\n"
        "def loss(result, target): return result\n"
    )
    (tmp_path / "own.toml").write_text(
        '[model]\nfactory = "own:model"\n[data]\nfactory = "own:data"\n[pipeline]\nstages = 2\nmicrobatches = 2\n'
        '[training]\nsteps = 1\nbatch = 8\nloss = "own:loss"\n'
    )
    said = refused(tmp_path / "own.toml", "--repetitions", 1)
    assert said.count("expected a loss to be a scalar, but got shape (4, 4)") == 1
