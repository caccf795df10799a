"""Checkpoints of stages with replicas: written once, loaded by any other number of replicas, stages and processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_checkpoints import Outcome, workers

from checkpoints import conv, differences, gpt, listing, pictures, state, steps, typed

torch.set_num_threads(1)
NO_DRAWS = {"dropout": 0.0}  # dropout depends on the stage and the replica
EXACT = 1e-12
LAYOUTS = [  # processes, stages and other options
    (1, 1, {}),
    (1, 2, {"replicas": [1, 2]}),
    (2, 2, {"schedule": "1f1b"}),
    (2, 1, {"replicas": 2}),
    (3, 2, {"replicas": [1, 2], "schedule": "gpipe"}),
    (3, 2, {"replicas": [2, 1], "shard": "optimizer"}),
    (4, 2, {"replicas": 2, "schedule": "interleaved", "chunks": 2, "shard": "gradients"}),
]


def named(layout) -> str:
    processes, stages, how = layout
    return f"{processes} processes, {stages} stages, {' '.join(map(str, how.values())) or 'plain'}"


def run(folder: Path, layout, *actions: str, kind: str = "gpt", **more) -> Outcome:
    """Do as a training script does, in one process or on as many ranks as there are slots."""
    processes, stages, how = layout
    return workers(folder, processes, *actions, kind=kind, stages=stages, **how, **more)


@pytest.fixture(scope="module", params=[{}, {"shard": "optimizer"}, {"shard": "gradients"}], ids=str)
def saved(request, tmp_path_factory):
    """By 2:1 replicas in double precision, two steps after an update, one of them accumulated: the path and two more
    losses."""
    folder = tmp_path_factory.mktemp("saved")
    path = folder / "step-3"
    how = {"replicas": [2, 1], "double": True, "accumulate": 2, **NO_DRAWS, **request.param}
    done = workers(folder / "out", 3, "step:3", f"save:{path}", "step:3", stages=2, **how)
    assert listing(folder) == ["out", "step-3"]
    return path, done.losses[3:]


def test_each_tensor_is_written_once(saved):
    """By the first replica of its stage: the second has no file."""
    assert listing(saved[0]) == [".metadata", "__0_0.distcp", "__2_0.distcp", "penstock.json"]
    facts = json.loads((saved[0] / "penstock.json").read_text())["facts"]
    files = {name: record["file"] for name, record in facts["tensors"].items()}
    assert set(files.values()) == {"__0_0.distcp", "__2_0.distcp"}
    names = {name for name, _ in gpt(1).model.named_parameters()}
    assert {name for name in files if name.startswith("model.")} == {f"model.{name}" for name in names}
    assert {name.removesuffix(".exp_avg") for name in files if name.endswith(".exp_avg")} == {
        f"optimizer.{name}" for name in names
    }
    assert {name for name in files if name.startswith("gradients.")} == {f"gradients.{name}" for name in names}
    grouped = [name for group in facts["groups"] for name in group["parameters"]]
    assert sorted(grouped) == sorted(names)


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_any_layout_goes_on_from_it(saved, layout, tmp_path):
    done = run(tmp_path, layout, f"load:{saved[0]}", "step:3", double=True, accumulate=2, **NO_DRAWS)
    assert done.losses == pytest.approx(saved[1], rel=EXACT)


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_replicas_go_on_from_any_layout(layout, tmp_path):
    path, how = tmp_path / "saved", {"double": True, **NO_DRAWS}
    done = run(tmp_path / "one", layout, "step:2", f"save:{path}", "step:3", **how)
    again = workers(tmp_path / "two", 3, f"load:{path}", "step:3", stages=2, replicas=[2, 1], **how)
    assert again.losses == pytest.approx(done.losses[2:], rel=EXACT)


def test_the_same_layout_goes_on_with_the_same_bits(tmp_path):
    """With dropout, and each rank's own random state."""
    path, how = tmp_path / "saved", {"stages": 2, "replicas": [2, 1]}
    done = workers(tmp_path / "one", 3, "random:", "step:2", f"save:{path}", "state:then", "draw:", "step:2", **how)
    again = workers(tmp_path / "two", 3, f"load:{path}", "state:then", "draw:", "step:2", **how)
    assert again.losses == done.losses[2:]
    assert not differences(again.state("then"), done.state("then"))
    drawn = [said["drawn"] for said in done.said]
    assert [said["drawn"] for said in again.said] == drawn
    assert len(set(map(tuple, drawn))) == 3
    inline = gpt(2, replicas=[2, 1])
    inline.load(path)
    assert not differences(state(inline), done.state("then"))
    assert steps(inline, 2) == done.losses[2:]


def test_batch_norms_of_replicas(tmp_path):
    """Every replica has the statistics of all rows; in training each normalises its own."""
    path = tmp_path / "saved"
    how = {"kind": "conv", "stages": 2, "replicas": [1, 2], "double": True}
    done = workers(tmp_path / "one", 3, "step:2", f"save:{path}", "state:then", "evaluate:", "step:2", **how)
    alone = conv(1, double=True)
    alone.load(path)
    assert not differences(state(alone), done.state("then"))
    assert alone.evaluate([typed(alone, pictures(99))]) == pytest.approx(done.losses[2], rel=EXACT)
    inline = conv(2, double=True, replicas=[1, 2])
    inline.load(path)
    assert steps(inline, 2, pictures) == done.losses[3:]
