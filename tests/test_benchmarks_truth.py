"""Predicted against measured: the figures of the table, and the way from a model to them. No speed is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.truth.foreseen import RANKS, SCHEDULES, foresee, plan
from benchmarks.truth.models import MODELS, cross_entropy
from benchmarks.truth.table import Line, markdown, mean_error, order, summary

from penstock import Cluster, Layer, Level, Profile, schedule, simulate

ROOT = Path(__file__).parent.parent


def lines(*figures):
    """(predicted, measured) of schedules a, b, c, ..."""
    return [Line("m", name, *pair) for name, pair in zip("abcdef", figures, strict=False)]


def test_errors_are_shares_of_what_was_measured():
    found = lines((1.1, 1.0), (0.98, 1.0), (2.0, 2.0))
    assert [round(line.error, 9) for line in found] == [0.1, -0.02, 0.0]
    assert mean_error(found) == pytest.approx(0.04)
    assert str(found[1]) == "m          b                980.0 ms    1000.0 ms    -2.0%"
    assert "| m | a | 1100.0 ms | 1000.0 ms | +10.0% |" in markdown(found)


def test_pairs_count_where_predictions_are_apart_and_within_a_model():
    near = lines((1.0, 1.2), (1.02, 1.0))  # too near to each other to say
    assert (order(near).pairs, order(near).wrong) == (0, ())
    far = lines((1.0, 1.2), (1.1, 1.0), (2.0, 2.0))
    found = order(far)
    assert found.pairs == 3
    assert [(fast.schedule, slow.schedule) for fast, slow in found.wrong] == [("a", "b")]
    other = [Line("n", "a", 9.0, 0.1)]
    assert order([*far, *other]) == found
    assert summary(far)[1] == "pairs predicted more than 3% apart: 3, out of order: 1"
    assert summary(far)[2] == "  m: a was predicted faster than b, and took +20.0%"


@pytest.mark.parametrize("name", SCHEDULES)
def test_plans_are_of_the_schedules_own_shape_and_predicted_by_its_simulation(name):
    profile = Profile(tuple(Layer(str(at), 1.0 + at % 2, 1.0, 1.0) for at in range(6)))
    cluster = Cluster.uniform((Level("link", RANKS, 1e9),))
    made = plan(profile, name, 4)
    built = schedule(name, stages=RANKS, microbatches=4)
    assert (made.placement, made.schedule) == (built.shape.placement, name)
    assert made.stages[-1].last == 5
    found = foresee(profile, cluster, name, 4)
    if name in ("pipedream", "2bw", "pipemare"):
        assert found.step_seconds == pytest.approx(4 * 11.0)  # the larger stage never waits
    else:
        assert found.step_seconds == simulate(built, profile=profile, plan=made, cluster=cluster).makespan


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_is_even_micro_batches_for_the_model(name):
    subject = MODELS[name]
    inputs, target = subject.batch()
    assert len(inputs) == len(target) == subject.microbatches * len(subject.example[0])
    assert cross_entropy(subject.model()(subject.example[0]), subject.example[1]).isfinite()


@pytest.mark.slow
def test_from_a_model_to_a_table_without_what_only_configs_need(tmp_path):
    """Where it is measured there may be no pydantic."""
    hidden, kept = tmp_path / "hidden", tmp_path / "kept"
    hidden.mkdir()
    (hidden / "pydantic.py").write_text("raise ImportError('not installed')")
    paths = [str(hidden), str(ROOT / "src"), str(ROOT)]
    words = ("tiny", "--schedules", "1f1b,zb-v,2bw", "--rounds", "1", "--repetitions", "1", "--keep", str(kept))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.truth", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "mean absolute error" in done.stdout
    assert {file.name for file in kept.iterdir()} >= {"cluster.toml", "tiny.profile.json", "tiny.1f1b.json", "found.md"}
    found = json.loads((kept / "found.json").read_text())
    assert [(line["model"], line["schedule"]) for line in found] == [("tiny", name) for name in ("1f1b", "zb-v", "2bw")]
    assert all(line["predicted"] > 0 and line["measured"] > 0 for line in found)
