"""A process's high-water mark is what the simulator's memory model says, summed over ranks as the engine runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import python

MIB = 2**20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the kernel's own high-water mark")
@pytest.mark.parametrize(("method", "recompute"), [("gpipe", "never"), ("1f1b", "never"), ("gpipe", "always")])
def test_the_high_water_mark_is_the_models_within_a_tenth(method, recompute):
    done = python(Path(__file__).with_name("footprint.py"), method, recompute)
    assert done.returncode == 0, done.stderr
    predicted, measured = map(int, done.stdout.split())
    assert predicted > 500 * MIB
    assert measured == pytest.approx(predicted, rel=0.1)
