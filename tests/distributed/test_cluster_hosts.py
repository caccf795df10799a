"""`penstock cluster measure` on two hosts that are made of network namespaces."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import pytest

import penstock
from distributed.hosts import Ranks, can_make_hosts, two_hosts
from penstock.core.cluster_file import read_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_hosts(), reason="needs root, to make network namespaces"),
]
SOURCES = str(Path(penstock.__file__).parent.parent)


def test_both_levels_are_measured_and_rank_0_writes(tmp_path):
    file = tmp_path / "cluster.toml"
    words = ["-m", "penstock.cli", "cluster", "measure", "-o", str(file)]
    with two_hosts() as (a, b), Ranks() as ranks:
        ranks.start(words, [a, a, b, b], PYTHONPATH=SOURCES)
        ended = ranks.wait(200.0)
    assert [rank.code for rank in ended] == [0] * 4, ended
    assert [rank.error.count("wrote") for rank in ended] == [1, 0, 0, 0]
    found = read_cluster(file)
    assert [(level.name, level.size) for level in found.levels] == [("inside", 2), ("between", 2)]
    for level in found.levels:
        assert level.bandwidth > 0
        assert isfinite(level.bandwidth)
        assert isfinite(level.reduce_bandwidth)
    assert len(found.devices) == 4
