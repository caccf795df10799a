"""Shared by all tests: the device that models are tested on, and one thread with a known seed.

`pytest --device cuda tests/model tests/engine tests/training` runs the tests of models on a GPU, marked `gpu`.
Helpers that tests share are found by the setting `pythonpath` in pyproject.toml.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

ROOMS = {"model", "comm", "engine", "training", "app"}
TESTS = Path(__file__).parent


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where the tests of models run: cpu or cuda")


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs beside it; children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--device") != "cpu":
        import torch

        torch.set_default_device(config.getoption("--device"))
        for said in ("Attempting to run cuBLAS", "RNN module weights are not part of single contiguous"):
            config.addinivalue_line("filterwarnings", f"ignore:{said}")  # torch's own, about speed


def pytest_collection_modifyitems(config, items):
    if config.getoption("--device") != "cpu":
        for item in items:
            if item.path.relative_to(TESTS).parts[0] in ROOMS:
                item.add_marker(pytest.mark.gpu)
            if item.get_closest_marker("cpu_only"):
                item.add_marker(pytest.mark.skip(reason="tensors that must be in host memory"))


@pytest.fixture
def one_thread():
    """Run a test on one thread, whose bits do not depend on the machine, from a known seed."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    yield
    torch.set_num_threads(before)
