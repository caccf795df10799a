"""Clusters from TOML: levels, kinds and presets, and one message with file and key for each fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock import Cluster, Device, FormatError, InputError, Level
from penstock.core.cluster_file import read_cluster
from penstock.core.cluster_presets import KINDS, PRESETS

WHOLE = """
hosts = 2
devices = 2
kind = ["fast", "slow"]

[kinds.fast]
memory = 80e9
speed = 2.0
host_bandwidth = 32e9

[kinds.slow]
memory = 16e9

[inside]
name = "nvlink"
bandwidth = 25e9
latency = 5e-6
reduce_bandwidth = 20e9
reduce_latency = 2e-5
reduce_rings = true

[between]
bandwidth = 1e9
shared = true
"""


@pytest.fixture
def read(tmp_path):
    def from_text(text, **changes):
        path = tmp_path / "c.toml"
        path.write_text(text)
        return read_cluster(path, **changes)

    return from_text


def test_hosts_kinds_and_links(read):
    fast, slow = Device("fast", 80e9, 2.0, 32e9), Device("slow", 16e9)
    inside = Level("nvlink", 2, 25e9, 5e-6, 20e9, reduce_rings=True, reduce_latency=2e-5)
    assert read(WHOLE) == Cluster((fast, fast, slow, slow), (inside, Level("between", 2, 1e9, shared=True)))
    assert Cluster.from_json(read(WHOLE).to_json()) == read(WHOLE)


def test_further_levels_and_a_preset_that_is_changed(read):
    found = read(
        'preset = "dgx-a100"\nhosts = 3\n[between]\nbandwidth = 9.0\n[[above]]\nname = "pod"\nsize = 2\nbandwidth = 1.0'
    )
    assert [(level.name, level.size, level.bandwidth) for level in found.levels] == [
        ("inside", 8, 300e9), ("between", 3, 9.0), ("pod", 2, 1.0),
    ]  # fmt: skip
    assert found.levels[1].latency == PRESETS["dgx-a100"]["between"]["latency"]
    assert found.devices == (Device("a100-80", 80e9, host_bandwidth=32e9),) * 48


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_cluster(name):
    preset = PRESETS[name]
    assert len(read_cluster(name).devices) == preset["hosts"] * preset["devices"]
    if "between" in preset:
        assert len(read_cluster(name, hosts=3).devices) == 3 * preset["devices"]


def test_rings_multiply_the_rate_of_an_all_reduce():
    level = Level("nvlink", 8, 10.0, reduce_bandwidth=4.0, reduce_rings=True)
    assert [level.reduce_rate(n) for n in (2, 3, 4, 8)] == [4, 4, 8, 16]
    assert Level("ethernet", 8, 10.0).reduce_rate(8) == 10


BAD = {
    "unknown key": (
        WHOLE + "bandwith = 3",
        "c.toml: between.bandwith: expected .* unknown key 'bandwith'; write bandwidth",
    ),
    "unknown at the top": ("colour = 1\n" + WHOLE, "c.toml: colour: expected .* unknown key 'colour'; drop it"),
    "unknown in a kind": (WHOLE.replace("speed", "sped"), "c.toml: kinds.fast.sped: .* write speed"),
    "text for a number": (
        WHOLE.replace("80e9", "'much'"),
        "c.toml: kinds.fast.memory: expected a number, but got 'much'",
    ),
    "half a host": (
        WHOLE.replace("hosts = 2", "hosts = 2.5"),
        "c.toml: hosts: expected a whole number of at least 1, but got 2.5",
    ),
    "no bandwidth": (
        WHOLE.replace("bandwidth = 1e9", ""),
        "c.toml: between.bandwidth: expected bytes/s of a transfer, but got none",
    ),
    "negative": (
        WHOLE.replace("1e9", "-1e9"),
        r"c.toml: between.bandwidth: expected a number above 0, but got -1000000000\.0",
    ),
    "none of it": (WHOLE.replace("80e9", "0"), "c.toml: kinds.fast.memory: expected a number above 0, but got 0"),
    "before it is sent": (WHOLE.replace("5e-6", "-1"), "c.toml: inside.latency: expected a number of 0 or more"),
    "no number": (WHOLE.replace("2e-5", "nan"), "c.toml: inside.reduce_latency: expected a number of 0 or more"),
    "without end": (WHOLE.replace("5e-6", "inf"), "c.toml: expected a latency of 0 or more seconds at level 'nvlink'"),
    "no devices": (WHOLE.replace("devices = 2", ""), "c.toml: devices: expected the key"),
    "hosts apart": (
        "hosts = 2\ndevices = 1\n[inside]\nbandwidth = 1.0",
        "c.toml: between: expected a table that joins the 2 hosts",
    ),
    "kinds short": (
        WHOLE.replace('["fast", "slow"]', '["fast"]'),
        "c.toml: kind: expected one kind, or one for each of 2 hosts, but got 1",
    ),
    "kind unknown": (
        WHOLE.replace('"slow"]', '"slower"]'),
        "c.toml: kind: expected .* but got 'slower'; add \\[kinds.slower\\]",
    ),
    "preset unknown": ("preset = 'dgx'", "c.toml: preset: expected one of .* but got 'dgx'"),
    "no table": ("inside = 3\n", "c.toml: inside: expected a table with .* but got 3"),
    "no size": (WHOLE + "[[above]]\nbandwidth = 1.0", "c.toml: above.size: expected how many groups"),
    "nothing inside": (
        "devices = 2\n[inside]",
        "c.toml: inside.bandwidth: expected bytes/s of a transfer, but got none",
    ),
    "nothing between": (
        "hosts = 2\ndevices = 2\n[inside]\nbandwidth = 1.0\n[between]",
        "c.toml: between.bandwidth: expected bytes/s of a transfer, but got none",
    ),
    "very slow": (
        WHOLE.replace("speed = 2.0", "speed = 1e-300"),
        "c.toml: expected speed of device 'fast' to be at least 1e-09, but got 1e-300; correct the device",
    ),
    "very large": (
        WHOLE.replace("80e9", "1" * 400),
        "c.toml: kinds.fast.memory: expected a whole number of .*, but got about 1e399; correct it",
    ),
    "very many devices": (
        "devices = 1000000000\n[inside]\nbandwidth = 1.0",
        "c.toml: expected at most 1000000 devices in all, but got 1000000000; describe a smaller cluster",
    ),
    "very many hosts": (
        "hosts = 1000000\ndevices = 2\n[inside]\nbandwidth = 1.0\n[between]\nbandwidth = 1.0",
        "c.toml: expected at most 1000000 devices in all, but got 2000000; describe a smaller cluster",
    ),
    "brackets": ("hosts = " + "[" * 100_000, "c.toml: expected TOML, but got brackets nested too deeply"),
    "digits": ("hosts = " + "1" * 5000, "c.toml: expected TOML, but got a whole number of thousands of digits"),
    "no TOML": ("hosts 2", "c.toml:1:7: expected TOML"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_one_message_with_file_and_key(read, text, message):
    with pytest.raises(FormatError, match=message):
        read(text)


def test_neither_a_file_nor_a_preset():
    with pytest.raises(FormatError, match=r"dgx-a10: expected a readable TOML file or a preset \(pc, .* No such file"):
        read_cluster("dgx-a10")


@pytest.mark.parametrize("hosts", [0, -1])
def test_hosts_in_place_of_the_file_s_own(hosts):
    with pytest.raises(InputError, match=f"hosts to be a whole number of at least 1, but got {hosts}"):
        read_cluster("dgx-a100", hosts)


def test_no_kinds_in_their_table(read):
    assert len(read("devices = 2\n[kinds]\n[inside]\nbandwidth = 1.0").devices) == 2


def test_what_the_page_says(read):
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    example = re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1]
    assert len(read(example).devices) == 2 * 8 * 4
    kinds = re.search(r"The kinds (.*?) are predefined;", page, re.DOTALL)[1]
    assert re.findall(r"`(.*?)`", kinds) == list(KINDS)
    for kind in KINDS:
        assert (
            read(f"devices = 1\nkind = '{kind}'\n[inside]\nbandwidth = 1.0").devices[0].memory == KINDS[kind]["memory"]
        )
