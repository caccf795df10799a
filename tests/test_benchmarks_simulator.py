"""README's figures of the simulator are those of its picture, and what the benchmark prints."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.simulator_sizes import LINES, SIZES, draw, show

from penstock import lower, schedule

ROOT = Path(__file__).parent.parent
PATH = re.compile(r'<path d="M([0-9. L]+)" fill="none"')


def table() -> tuple[dict[str, dict[tuple[int, int], float]], dict[tuple[int, int], int]]:
    """Microseconds an action by line and size, and the actions of every size, as README has them."""
    rows = re.findall(r"^\| (\d+) x ([\d,]+) \| ([\d,]+) \| (.*) \|$", (ROOT / "README.md").read_text(), re.M)
    figures = {(int(p), int(m.replace(",", ""))): list(map(float, row.split(" | "))) for p, m, _, row in rows}
    actions = {size: int(row[2].replace(",", "")) for size, row in zip(figures, rows, strict=True)}
    return {line: {size: row[at] for size, row in figures.items()} for at, line in enumerate(LINES)}, actions


def curves(picture: str) -> list[list[float]]:
    return [list(map(float, re.split("[ L]", path))) for path in PATH.findall(picture)]


def test_the_table_is_what_the_benchmark_prints(capsys):
    figures, actions = table()
    assert tuple(actions) == SIZES
    show(figures, actions)
    printed = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\| \d", line)]
    assert printed == [line for line in (ROOT / "README.md").read_text().splitlines() if line in printed]


@pytest.mark.parametrize("size", SIZES[:6])
def test_actions_are_those_of_the_schedule(size):
    assert table()[1][size] == len(lower(schedule("1f1b", stages=size[0], microbatches=size[1])))


def test_the_picture_draws_the_table():
    drawn = curves((ROOT / "docs" / "pictures" / "simulator-sizes.svg").read_text())
    again = curves(draw(*table()))
    assert len(drawn) == len(LINES)
    for curve, other in zip(drawn, again, strict=True):
        assert curve == pytest.approx(other, abs=0.3), "three digits of a figure are a tenth of a pixel"


def test_an_action_takes_less_the_more_there_are():
    """Within noise, for which a fifth is allowed: of calls in a loop, built or not."""
    figures, _ = table()
    for line in ("loop", "built"):
        column = [figures[line][size] for size in SIZES]
        assert all(later < 1.2 * earlier for earlier, later in pairwise(column)), column
