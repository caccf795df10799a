"""A sample of the net of `make zoo`: models that differ in what they do between their blocks."""

from __future__ import annotations

import pytest
from build import names
from run import launch
from table import KINDS, table

SAMPLE = {
    "inline": ("net densenet", "letters wav2vec2", "seq2seq t5gemma2"),
    "ranks": ("net u-net", "masked longformer", "causal qwen3_next"),
}
SCHEDULE = {"inline": "zb-h1", "ranks": "1f1b"}


@pytest.mark.parametrize("way", SAMPLE)
def test_a_sample_trains_as_plain_training_does(way, tmp_path):
    found = launch(way, list(SAMPLE[way]), [SCHEDULE[way]], tmp_path)
    records = {name: of[SCHEDULE[way]] for name, of in found.items()}
    assert set(records) == set(SAMPLE[way])
    assert {name: record for name, record in records.items() if record["outcome"] != "exact"} == {}
    assert all(record["moved"] > 1e-3 for record in records.values())


def test_the_net_is_wide():
    kinds = [name.partition(" ")[0] for name in names()]
    assert set(kinds) == set(KINDS)
    assert len(kinds) == len(names()) >= 250


def test_the_table_says_what_came_of_each_model():
    exact = {"outcome": "exact", "off": 2e-12, "against": "whole batches"}
    said = {"outcome": "refused", "said": "SplitError: expected one, but got /a/site-packages/two | three"}
    missing = {"outcome": "not tried", "said": "ImportError: Three requires the PIL library but it was not found"}
    inline = {"net a": {"1f1b": exact, "zb-h1": exact}, "masked b": {"1f1b": said}, "images c": {"1f1b": missing}}
    page = table(["net a", "masked b", "images c"], inline, {"net a": {"1f1b": {**exact, "outcome": "wrong"}}})
    for row in (
        "| a | exact | 1f1b wrong | whole batches | 2e-12 |",
        "| b | 1f1b refused | not run |  |  |",
        "| masked b | SplitError: expected one, but got two \\| three |",
        "| images c | needs the package PIL |",
        "| inline | 1f1b | 1 | 1 | 0 | 0 | 0 |",
        "| 2 ranks | 1f1b | 0 | 0 | 0 | 1 | 1 |",
    ):
        assert row in page
