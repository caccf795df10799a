"""Calibrations: measured here and read back, files of one's own, and one message for each fault in one."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock import FormatError
from penstock.profiler.calibrate import calibrate
from penstock.profiler.calibration import calibration_text, read_machine
from penstock.profiler.devices import ARITHMETICS, MACHINES, Machine, machine_of

positive = st.floats(1e-3, 1e18)
short = st.floats(0, 1)
share = st.floats(0.01, 1)


@pytest.fixture(scope="module")
def here():
    """By the clock of this process, whatever else runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield calibrate(clock=time.process_time)
    torch.set_num_threads(threads)


@pytest.fixture
def read(tmp_path):
    def from_text(text, device=None):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return read_machine(device, path)

    return from_text


@given(
    peaks=st.tuples(*[positive] * 5), rates=st.tuples(positive, short, share, short, share, share, short),
    kind=st.sampled_from(("h100", "cpu", "my own")),
)  # fmt: skip
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_written_is_read(tmp_path_factory, peaks, rates, kind):
    machine = Machine(kind, dict(zip(ARITHMETICS, peaks, strict=True)), *rates)
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(calibration_text(machine))
    found = read_machine(None, path)
    assert found.kind == kind
    assert found.peaks == pytest.approx(machine.peaks, rel=1e-5)
    names = ("bandwidth", "launch", "matmul_share", "matmul_ramp", "attention_share", "memory_share", "memory_ramp")
    assert [getattr(found, name) for name in names] == pytest.approx(list(rates), rel=1e-5)


def test_measured_here(here, tmp_path):
    assert here.kind == ("cpu" if not torch.cuda.is_available() else here.kind)
    assert min(here.peaks.values()) > 1e6
    assert here.bandwidth > 1e7
    assert 0 < here.launch < 0.1
    path = tmp_path / "here.toml"
    path.write_text(calibration_text(here))
    assert read_machine(here.kind, path).peaks == pytest.approx(here.peaks, rel=1e-5)


def test_an_estimate_for_this_cpu_is_not_far_off(here, tmp_path):
    """A block of a Transformer, in seconds of this process: within a factor of three, forward and backward."""
    if torch.cuda.is_available():
        pytest.skip("what was calibrated is the GPU")
    path = tmp_path / "here.toml"
    path.write_text(calibration_text(here))
    block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    x = torch.randn(4, 128, 256, requires_grad=True)
    found = penstock.estimate(nn.Sequential(nn.Identity(), block), x, calibration=path)
    took = min(_once(block, x) for _ in range(5))
    assert took / 3 < sum(layer.seconds for layer in found.layers) < 3 * took


def _once(block, x):
    start = time.process_time()
    block(x).sum().backward()
    return time.process_time() - start


def test_a_file_corrects_what_is_known(read):
    known = machine_of("a100")
    assert read("", "a100") == known
    assert read("launch = 1e-6\n[peaks]\nbf16 = 200e12", "a100") == replace(
        known, launch=1e-6, peaks={**known.peaks, "bf16": 200e12}
    )
    assert read('device = "a100"', None) == read('device = "a100-80"', "a100") == known


def test_a_device_of_ones_own(read):
    found = read('device = "abacus"\nbandwidth = 1e9\n[peaks]\nfp32 = 4e9\nfp64 = 1e9')
    assert (found.kind, found.bandwidth, found.memory) == ("abacus", 1e9, float("inf"))
    assert found.peaks == {"fp64": 1e9, "fp32": 4e9, "tf32": 1e9, "bf16": 1e9, "fp16": 1e9}  # the least, where unknown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bandwith = 1e9", "mine.toml: bandwith: expected a key of a calibration.*did you mean bandwidth"),
        ("[peaks]\nint9 = 1e9", "mine.toml: peaks: int9: expected a key.*choose one of fp64"),
        ("bandwidth = 0", "mine.toml: bandwidth: expected a number above 0, but got 0"),
        ("bandwidth = 'fast'", "mine.toml: bandwidth: expected a number above 0, but got 'fast'"),
        ("bandwidth = true", "mine.toml: bandwidth: expected a number above 0, but got True"),
        ("launch = -1e-6", "mine.toml: launch: expected seconds, 0 or more, but got -1e-06"),
        ("memory_ramp = nan", "mine.toml: memory_ramp: expected seconds, 0 or more, but got nan"),
        ("matmul_share = 1.5", "mine.toml: matmul_share: expected a share above 0 and at most 1, but got 1.5"),
        ("[peaks]\nbf16 = inf", "mine.toml: peaks.bf16: expected a number above 0, but got inf"),
        ("peaks = 3", "mine.toml: peaks: expected a table of operations/s, but got 3"),
        ("device = 7", "mine.toml: device: expected the name of a device, but got 7"),
        ('device = "v100"', "mine.toml: device: expected 'h100', as requested, but got 'v100'"),
        ("launch = = 1", "mine.toml:1:10: expected TOML"),
    ],
)
def test_a_fault_in_a_file_gets_one_message(read, text, said):
    with pytest.raises(FormatError, match=said):
        read(text, "h100")


def test_what_is_missing(read, tmp_path):
    with pytest.raises(FormatError, match="device: expected the name of a device, here or as a flag, but got none"):
        read("launch = 1e-6")
    with pytest.raises(
        FormatError, match=r"peaks: expected peaks, for a device that is not known \(v100-16.*none; add"
    ):
        read('device = "abacus"\nbandwidth = 1e9')
    with pytest.raises(FormatError, match="bandwidth: expected bandwidth, for a device that is not known"):
        read('device = "abacus"\n[peaks]\nfp32 = 1e9')
    with pytest.raises(FormatError, match=r"nowhere.toml: expected a readable calibration, but got No such file"):
        read_machine("h100", tmp_path / "nowhere.toml")
    with pytest.raises(penstock.InputError, match="the name of a device, but got 'h10'"):
        read("launch = 1e-6", "h10")
    assert "h100" in MACHINES
