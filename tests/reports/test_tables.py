"""Memory by kind, a line a slot, and what was measured beside it."""

from __future__ import annotations

import pytest
from rich.console import Console
from timelines import in_bytes, measured, plain

from penstock.errors import InputError
from penstock.reports.tables import memory_table

MIB = 2.0**20


def printed(table):
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.strip("│┃ ") for line in captured.get().splitlines() if "│" in line or "┃" in line]


def test_every_kind_has_its_column():
    head, first, second = printed(memory_table(in_bytes(), [30.5 * MIB, 29 * MIB]))
    columns = [part.strip() for part in head.split("┃")]
    assert columns[:4] == ["slot", "weights", "optimizer state", "gradients"]
    assert columns[-2:] == ["all, predicted", "measured"]
    cells = [part.strip() for part in first.split("│")]
    assert cells[:4] == ["rank 0", "3 MiB", "6 MiB", "3 MiB"]
    assert cells[-1] == "30.5 MiB"
    assert second.endswith("29 MiB")


def test_the_prediction_stands_alone_where_nothing_was_measured():
    assert "measured" not in printed(memory_table(in_bytes()))[0]


def test_memory_in_units_of_a():
    assert printed(memory_table(plain()))[1].split("│")[-1].strip() == "4 A"


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="measured memory of 2 slots, but got 3"):
        memory_table(in_bytes(), [1.0, 2.0, 3.0])
    with pytest.raises(InputError, match="a timeline with memory"):
        memory_table(measured())
