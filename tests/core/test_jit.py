"""Kernels: plain at first, compiled later, the same bits either way, and compiled once for all processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock import schedule, simulate
from penstock.core import jit, lower, match, memory_events
from penstock.core.laws import action_index, versions
from penstock.simulator import run

KERNELS = (lower._emit, match._match, action_index._count, versions._read, run._clock, memory_events._find)
METHODS = ["naive", "gpipe", "1f1b", "dapple", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "2bw", "pipemare"]


def outcome(name):
    replicas = 1 if name == "dualpipe-v" else (2, 1, 3, 2)
    built = schedule(name, stages=4, microbatches=8, batches=2, replicas=replicas)
    costs = {"forward": [1, 0.3, 0.7, 1.1], "input_grad": 0.9, "transfer": 0.13, "reduce": 0.2, "update": 0.1}
    line = simulate(built, **costs)
    return line.schedule, line.start, line.end, line.weight_versions


@pytest.mark.parametrize("name", METHODS)
def test_plain_and_compiled_kernels_give_the_same_bits(name, monkeypatch):
    found = {}
    for way in ("plain", "compiled"):
        for kernel in KERNELS:
            monkeypatch.setattr(kernel, "_compiled", getattr(kernel, way))
        found[way] = outcome(name)
    assert found["plain"][0] == found["compiled"][0]
    for one, other in zip(found["plain"][1:], found["compiled"][1:], strict=True):
        assert np.array_equal(one, other)


def doubled(values):
    for at in range(len(values)):
        values[at] *= 2


def test_a_loop_of_small_calls_is_compiled_when_its_rows_add_up(monkeypatch):
    monkeypatch.setattr(jit, "COMPILE_FROM", 10)
    kernel, values = jit.kernel(doubled), np.ones(4)
    kernel(4, values)
    kernel(4, values)
    assert kernel._compiled is None
    kernel(4, values)
    assert kernel._compiled is not None
    kernel(4, values)
    assert values.tolist() == [16.0] * 4


COUNT = """
import numpy as np
from penstock import schedule
from penstock.core import jit, memory_events
from penstock.core.lower import lower

jit.COMPILE_FROM = 0
full = lower(schedule("1f1b", stages=2, microbatches=2))
events = memory_events.memory_events(full)
stats = memory_events._find.compiled.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), int(events.sum()))
"""


@pytest.fixture
def read_only(tmp_path):
    """An installation that can keep nothing beside its source, for a user without a home."""
    source = Path(penstock.__file__).parent
    installed = tmp_path / "site" / "penstock"
    shutil.copytree(source, installed, ignore=shutil.ignore_patterns("__pycache__"))
    for directory in (installed, *(path for path in installed.rglob("*") if path.is_dir())):
        (directory / "__pycache__").write_text("")
    home = tmp_path / "home"
    home.write_text("")
    spare = tmp_path / "tmp"
    spare.mkdir()
    unset = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    asked = {key: value for key, value in os.environ.items() if key not in unset}
    told = {"HOME": str(home), "TMPDIR": str(spare), "PYTHONPATH": str(installed.parent)}

    def count():
        done = subprocess.run([sys.executable, "-c", COUNT], env=asked | told, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [int(number) for number in done.stdout.split()]

    return spare / f"penstock-{os.getuid()}", count


def test_compiled_code_is_kept_where_the_installation_is_read_only(read_only):
    directory, count = read_only
    hits, misses, result = count()
    assert (hits, misses) == (0, 1)
    assert directory.stat().st_mode & 0o077 == 0
    assert list(directory.rglob("*.nbc"))
    assert count() == [1, 0, result]


def test_a_directory_that_others_can_write_is_never_trusted(read_only):
    directory, count = read_only
    directory.mkdir()
    directory.chmod(0o777)
    count()
    assert not list(directory.iterdir())
    assert count()[0] == 0
