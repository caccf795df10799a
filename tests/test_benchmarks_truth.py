"""Predicted against measured: the figures of the table, and the way from a config to them. No speed is asserted."""

import json
from pathlib import Path

import pytest
from benchmarks.truth.__main__ import CONFIGS, main
from benchmarks.truth.foreseen import RANKS, SCHEDULES, foresee, plan
from benchmarks.truth.table import Line, markdown, mean_error, order, summary

from penstock import Cluster, Layer, Level, Profile, schedule, simulate
from penstock.app.config_file import read_config

TINY = """
[model]
factory = "benchmarks.truth.models:resnet"
arguments = { channels = 4, blocks = 4 }
[data]
factory = "benchmarks.truth.models:images"
arguments = { rows = 8, size = 8 }
[pipeline]
stages = 2
microbatches = 4
[optimizer]
name = "SGD"
lr = 1e-5
[training]
steps = 2
batch = 8
"""


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


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_the_models_can_be_read(config):
    assert read_config(config).pipeline.microbatches >= RANKS


@pytest.mark.slow
def test_from_a_config_to_a_table(tmp_path, capsys):
    config = tmp_path / "tiny.toml"
    config.write_text(TINY)
    once = ("--rounds", "1", "--repetitions", "1", "--keep", str(tmp_path / "kept"))
    found = main([str(config), "--schedules", "1f1b,zb-v,2bw", *once])
    assert [(line.model, line.schedule) for line in found] == [("tiny", name) for name in ("1f1b", "zb-v", "2bw")]
    assert all(line.predicted > 0 and line.measured > 0 for line in found)
    said = capsys.readouterr().out
    assert "mean absolute error" in said
    kept = {file.name for file in Path(tmp_path / "kept").iterdir()}
    assert kept >= {"cluster.toml", "tiny.profile.json", "tiny.1f1b.json", "found.json", "found.md"}
    assert len(json.loads((tmp_path / "kept" / "found.json").read_text())) == 3
