"""What a terminal shows, with and without colour."""

from __future__ import annotations

import pytest
from rich.console import Console
from timelines import CASES, plain, predicted

from penstock.core.action import Action, Op
from penstock.core.check import check
from penstock.core.schedule import Schedule
from penstock.reports.palette import FILLS
from penstock.reports.terminal import gantt, grid, summary
from penstock.schedules.registry import schedule


def shown(what: object, colour: bool, width: int = 120) -> str:
    console = Console(width=width, color_system="truecolor" if colour else None, force_terminal=colour)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def test_gantt_is_to_scale():
    """F 1 s, B 2 s, 9 s in 36 columns: 4 columns a second."""
    drawing = str(gantt(predicted("gpipe", 2, 2, {}), 8 + 36)).splitlines()
    assert drawing[:3] == [
        "rank 0  F0──F1──............B1──────B0──────",
        "rank 1  ....F0──F1──B1──────B0──────........",
        "        0 s                 5 s",
    ]


@pytest.mark.parametrize("case", ["plain", "weight gradients apart", "two chunks"])
def test_dots_are_the_idle_time(case):
    line = CASES[case]()
    drawing = str(gantt(line, 1008)).splitlines()
    for slot in range(line.schedule.shape.slots):
        assert drawing[slot][8:].count(".") / 1000 == pytest.approx(float(line.idle[slot]) / line.makespan, abs=0.03)


def test_letters_tell_the_operations_apart():
    drawing = str(gantt(CASES["weight gradients apart"](), 160)).splitlines()[0]
    assert {"F4", "I4", "W4"} <= {drawing[at : at + 2] for at in range(len(drawing))}


def test_a_pair_shows_both_halves():
    assert "F3─&b1─" in str(gantt(CASES["overlapped pairs"](), 100))


def test_more_actions_than_columns_still_fit():
    line = predicted("1f1b", 2, 200, {})
    assert all(len(text) <= 60 for text in str(gantt(line, 60)).splitlines())


def test_colours_are_those_of_the_palette():
    red, green, blue = (int(FILLS[Op.B][at : at + 2], 16) for at in (1, 3, 5))
    assert f"48;2;{red};{green};{blue}m" in shown(gantt(plain(), 100), colour=True)
    assert "\x1b" not in shown(gantt(plain(), 100), colour=False)


def test_grid_prints_the_words():
    built = schedule("1f1b", stages=2, microbatches=3)
    lines = str(grid(built)).splitlines()
    assert [line.split()[2:] for line in lines] == built.words()
    assert len({len(line) for line in lines}) == 1


def test_a_long_grid_is_broken_into_blocks():
    built = schedule("1f1b", stages=2, microbatches=9)
    blocks = str(grid(built, width=40)).split("\n\n")
    assert all(len(line) <= 40 for block in blocks for line in block.splitlines())
    joined = [[word for block in blocks for word in block.splitlines()[slot].split()[2:]] for slot in range(2)]
    assert joined == built.words()


def test_faults_are_marked_and_told():
    built = schedule("gpipe", stages=2, microbatches=2)
    words = built.words()
    words[1][0], words[1][2] = words[1][2], words[1][0]  # a backward before its forward
    broken = Schedule.of_slots(built.shape, [[Action.parse(word) for word in slot] for slot in words])
    report = check(broken)
    drawing = str(grid(broken, report.faults))
    assert f"!{words[1][0]}" in drawing
    assert all(str(fault) in drawing for fault in report.faults)


def test_summary_holds_the_figures():
    line = plain()
    table = shown(summary(line), colour=False)
    assert "1f1b, predicted: makespan 38.3 s, bubble 36.0%, utilisation 64.0%" in table
    rank_3 = next(text for text in table.splitlines() if "rank 3" in text)
    cells = [cell.strip() for cell in rank_3.strip("│\n ").split("│")]
    assert cells == ["rank 3", "3", "24.5 s", "13.8 s", "36.0%", "3 s", "1 A", "1"]


def test_versions_are_counted():
    assert shown(summary(CASES["versions"]()), colour=False).count(" 2 │\n") == 3
