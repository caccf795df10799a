"""`penstock cluster measure`: real workers on this host, a file that can be read, and one message for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from math import inf, isfinite
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Cluster, Device, InputError
from penstock.app.cluster.command import measure_command
from penstock.app.cluster.measure import equalize, host_memory, hosts_of
from penstock.app.cluster.probe import SIZES, fit, spread
from penstock.core.cluster_file import read_cluster
from penstock.core.links import ring_seconds

PENSTOCK = [sys.executable, "-m", "penstock.cli", "cluster"]


def penstock(*words):
    return subprocess.run([*PENSTOCK, *map(str, words)], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two local workers, once: the file, and what was printed."""
    file = tmp_path_factory.mktemp("measured") / "cluster.toml"
    done = penstock("measure", "--devices", 2, "-o", file, "--json")
    assert done.returncode == 0, done.stderr
    assert f"wrote {file}" in done.stderr
    return file, json.loads(done.stdout)


def test_two_workers_give_a_file_that_can_be_read(measured):
    file, _ = measured
    found = read_cluster(file)
    (inside,) = found.levels
    assert len(found.devices) == inside.size == 2
    figures = (inside.bandwidth, inside.latency, inside.reduce_bandwidth, inside.reduce_latency)
    assert all(isfinite(figure) and figure > 0 for figure in figures[::2])
    assert all(isfinite(figure) and figure >= 0 for figure in figures[1::2])
    assert found.devices[0] == found.devices[1]
    assert inside.blocking == (found.devices[0].kind == "cpu")  # which share memory, and copy into it themselves


@pytest.mark.cpu_only
def test_workers_share_the_memory_of_the_host(measured):
    memory = read_cluster(measured[0]).devices[0].memory
    assert 0 < memory < host_memory()


def test_json_holds_the_cluster_of_the_file_and_what_was_measured(measured):
    file, told = measured
    assert Cluster.from_json(told) == read_cluster(file)
    assert [(line["level"], line["what"]) for line in told["measured"]] == [
        ("inside", "transfers"), ("inside", "all-reduce of 2"),
    ]  # fmt: skip
    for line in told["measured"]:
        assert [int(size) for size in line["medians"]] == list(SIZES)
        assert all(0 < seconds < 10 for seconds in line["medians"].values())
        assert line["medians"][str(SIZES[-1])] > line["medians"][str(SIZES[0])]


def test_the_simulators_formula_gives_what_all_reduces_took(measured):
    line = measured[1]["measured"][1]
    figures = line["bandwidth"], line["latency"]
    off = [abs(ring_seconds(2, int(size), *figures) - took) / took for size, took in line["medians"].items()]
    assert max(off) == pytest.approx(line["misfit"], rel=1e-6)


def test_the_file_says_what_was_measured_and_every_doubt(measured):
    file, told = measured
    comments = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert any("inside, transfers: 1 KB took" in line and "16 MB took" in line for line in comments)
    doubts = [doubt for line in told["measured"] for doubt in line["doubts"]]
    assert sum(any(doubt in line for line in comments) for doubt in doubts) == len(doubts)


def test_one_worker_has_no_link(tmp_path):
    done = penstock("measure", "--devices", 1)
    assert done.returncode == 0, done.stderr
    (tmp_path / "c.toml").write_text(done.stdout)
    found = read_cluster(tmp_path / "c.toml")
    assert (len(found.devices), found.levels[0].bandwidth) == (1, inf)


@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e12))
def test_a_line_is_found_again(latency, bandwidth):
    found = fit({size: [latency + size / bandwidth] * 3 for size in SIZES})
    assert all(
        found.latency + size / found.bandwidth == pytest.approx(latency + size / bandwidth, rel=1e-6) for size in SIZES
    )
    assert found.misfit < 1e-6
    assert found.doubts == []


@given(st.lists(st.lists(st.floats(1e-7, 10.0), min_size=1, max_size=9), min_size=8, max_size=8))
def test_whatever_was_timed_the_figures_can_be_used(seconds):
    found = fit(dict(zip(SIZES, seconds, strict=True)))
    assert found.latency >= 0
    assert isfinite(found.latency)
    assert 0 < found.bandwidth < inf
    assert found.medians == {size: median(some) for size, some in zip(SIZES, seconds, strict=True)}


def test_seconds_that_grow_faster_than_bytes_have_no_latency():
    found = fit({1000: [1e-6], 2000: [4e-6]})
    assert found.latency == 0.0
    assert 1000 * 1e6 / 4 < found.bandwidth < 1000 * 1e6


def test_noise_and_bends_are_said():
    quiet = {size: [1.0 + size / 1e6] * 8 for size in SIZES}
    assert spread([1.0, 1.0, 1.0, 9.0]) == 2.0
    noisy = fit(quiet | {SIZES[0]: [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]})
    assert noisy.doubts[0].startswith("noisy: samples of one size differ by 100%")
    bent = fit(quiet | {SIZES[4]: [50.0]})
    assert any(doubt.startswith("no straight line") for doubt in bent.doubts)


def test_devices_of_a_kind_get_the_least_of_all():
    devices = [Device("cpu", 8.0, 1.0, 3.0), Device("gpu", 4.0), Device("cpu", 6.0, 1.0, 5.0)]
    assert equalize(devices) == (Device("cpu", 6.0, 1.0, 3.0), Device("gpu", 4.0), Device("cpu", 6.0, 1.0, 3.0))


def test_ranks_are_the_same_number_on_every_host():
    assert hosts_of(("a",) * 3) == (1, 3)
    assert hosts_of(("b", "b", "a", "a")) == (2, 2)
    for names in (("a", "a", "b"), ("a", "b", "a", "b")):
        with pytest.raises(InputError, match="the same number of ranks on every host, one after the other, but got"):
            hosts_of(names)


@pytest.mark.parametrize("count", [0, -1, True])
def test_a_number_of_devices_that_makes_no_sense(count):
    with pytest.raises(InputError, match="--devices to be a whole number of at least 1"):
        measure_command(devices=count)


def test_a_file_that_cannot_be_written_is_found_out_before(tmp_path):
    (tmp_path / "file").write_text("")
    done = penstock("measure", "-o", tmp_path / "file" / "c.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("penstock: expected a cluster file that can be written, but got")
    assert done.stderr.count("\n") == 1


def test_devices_under_torchrun_are_its_own_to_say(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="no --devices under torchrun"):
        measure_command(devices=2)


def test_list_and_show():
    assert "dgx-h100" in penstock("list").stdout.splitlines()
    assert Cluster.from_json(json.loads(penstock("show", "dgx-h100", "--json").stdout)) == read_cluster("dgx-h100")
    assert "bandwidth = 450000000000.0" in penstock("show", "dgx-h100").stdout
    done = penstock("show", "dgx-h1000")
    assert (done.returncode, done.stdout) == (2, "")
    assert "dgx-h1000: expected a readable TOML file or a preset" in done.stderr
