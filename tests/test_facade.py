"""The facade: a short sorted list, complete, each name loaded on demand."""

from __future__ import annotations

import subprocess
import sys

import pytest

import penstock


def test_the_list_is_sorted_and_every_name_loads():
    assert penstock.__all__ == sorted(penstock.__all__)
    assert set(penstock.__all__) == set(penstock._HOME)
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'shedule'"):
        penstock.shedule  # noqa: B018


def test_importing_penstock_imports_neither_numpy_nor_torch():
    code = "import sys, penstock; assert not {'numpy', 'torch', 'numba', 'typer'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_everything_but_the_command_line_works_without_the_command_lines_packages():
    code = (
        "import sys\n"
        "for name in ('typer', 'pydantic', 'torch'):\n    sys.modules[name] = None\n"
        "import penstock\n"
        "for name in penstock.__all__:\n"
        "    if name not in ('Pipeline', 'Step', 'estimate', 'muon', 'nesterov', 'profile', 'register_transport'):\n"
        "        getattr(penstock, name)\n"
        "line = penstock.simulate(penstock.schedule('1f1b', stages=2, microbatches=2))\n"
        "from penstock.reports.html import html\nfrom penstock.reports.svg import svg\nhtml(line), svg(line)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
