"""What a cluster is written as is read as the same cluster."""

from __future__ import annotations

import tomllib
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Cluster, Device, InputError, Level
from penstock.core.cluster_file import from_table, read_cluster
from penstock.core.cluster_presets import PRESETS
from penstock.core.cluster_toml import to_toml

positive = st.floats(1e-9, 1e30) | st.integers(1, 10**15)
zero_or_more = st.floats(0, 1e30)
levels = st.builds(
    Level,
    st.text(max_size=4) | st.sampled_from(["inside", "between", "above"]),
    st.integers(1, 4),
    positive | st.just(float("inf")),
    zero_or_more,
    st.none() | positive,
    st.booleans(),
    st.booleans(),
    st.none() | zero_or_more,
    st.booleans(),
)


@st.composite
def clusters(draw):
    joined = tuple(draw(st.lists(levels, min_size=1, max_size=4)))
    names = draw(st.lists(st.text(max_size=5) | st.sampled_from(["h100", "device"]), unique=True, min_size=1))
    memory = positive | st.just(float("inf"))
    kinds = [Device(name, draw(memory), draw(positive), draw(st.just(0.0) | positive)) for name in names]
    hosts = [draw(st.sampled_from(kinds)) for _ in range(prod(level.size for level in joined[1:]))]
    return Cluster(tuple(device for device in hosts for _ in range(joined[0].size)), joined)


@given(clusters(), st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]))))
def test_round_trip(cluster, notes):
    text = to_toml(cluster, notes)
    assert from_table(tomllib.loads(text), "text") == cluster
    assert text.count("# ") >= len(notes)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_through_a_file(name, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(to_toml(read_cluster(name)))
    assert read_cluster(file) == read_cluster(name)


def test_as_a_person_reads_it():
    cluster = Cluster(
        (Device("fast", 8e10, 2.0, 3.2e10),) * 2 + (Device("slow"),) * 2,
        (Level("inside", 2, 25e9, 5e-6, 2e10), Level("rack", 2, 1e9, shared=True)),
    )
    assert to_toml(cluster, ["measured"]) == (
        '# measured\nhosts = 2\ndevices = 2\nkind = ["fast", "slow"]\n\n'
        '[kinds."fast"]\nmemory = 80000000000.0\nspeed = 2.0\nhost_bandwidth = 32000000000.0\n\n'
        '[kinds."slow"]\n\n'
        "[inside]\nbandwidth = 25000000000.0\nlatency = 5e-06\nreduce_bandwidth = 20000000000.0\n\n"
        '[between]\nname = "rack"\nbandwidth = 1000000000.0\nshared = true\n'
    )


@pytest.mark.parametrize(
    ("devices", "sizes", "said"),
    [
        ((Device(),), (), "a cluster with at least one level, but got none"),
        ((Device("a"), Device("b")), (2,), "devices of one kind on each host, but got several kinds on host 0"),
        (
            (Device("a"), Device("a", 8.0)),
            (1, 2),
            "the same figures for all devices of kind 'a', but got different ones",
        ),
    ],
)
def test_what_the_format_cannot_say(devices, sizes, said):
    with pytest.raises(InputError, match=said):
        to_toml(Cluster(devices, tuple(Level(f"l{n}", size, 1.0) for n, size in enumerate(sizes))))
