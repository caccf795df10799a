"""Lanes between two hosts that are made of network namespaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.hosts import Host, Rank, can_make_hosts, run, two_hosts

SCRIPT = str(Path(__file__).parent.parent / "comm" / "transport" / "choose_ranks.py")
pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="needs root, to make network namespaces")


@pytest.fixture
def hosts():
    with two_hosts() as made:
        yield made


def kinds(ranks: list[Rank]) -> dict[str, str]:
    return {name: kind for rank in ranks for name, kind in json.JSONDecoder().raw_decode(rank.out)[0].items()}


def complaints(rank: Rank) -> list[str]:
    """Without torch's, that nobody knows a name for an address."""
    return [line for line in rank.error.splitlines() if line and "hostname of the client socket" not in line]


def test_gloo_between_hosts_and_shared_memory_within(hosts: tuple[Host, Host]):
    a, b = hosts
    found = kinds(run([SCRIPT, "everyday"], [a, a, b, b]))
    assert found["0>1"] == found["1>0"] == found["2>3"] == found["6>7"] == "shared"
    assert found["1>2"] == found["2>1"] == found["5>6"] == found["0>2"] == "gloo"
    assert found["3>4"] == "local"


def test_a_rank_that_leaves_early_loses_nothing_between_hosts(hosts: tuple[Host, Host]):
    a, b = hosts
    assert all(complaints(rank) == [] for rank in run([SCRIPT, "leaves_early"], [a, b, a]))


def test_shared_memory_between_hosts_is_refused(hosts: tuple[Host, Host]):
    for rank in run([SCRIPT, "forced_shared"], list(hosts)):
        assert "expected all ranks on one host for transport='shared'" in rank.out
