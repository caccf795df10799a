"""What a terminal shows, with and without colour."""

from __future__ import annotations

import re

import pytest
from rich.console import Console
from timelines import CASES, plain, predicted

from penstock.core.action import Action, Op
from penstock.core.check import check
from penstock.core.schedule import Schedule
from penstock.reports.figures import headline
from penstock.reports.gantt import gantt
from penstock.reports.grid import grid
from penstock.reports.palette import FILLS
from penstock.reports.tables import summary
from penstock.schedules.registry import schedule
from penstock.simulator.simulate import simulate


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
    assert "1f1b, predicted: makespan 38.3 s of one mini-batch, bubble 36.0%, utilisation 64.0%" in table
    rank_3 = next(text for text in table.splitlines() if "rank 3" in text)
    cells = re.split(r"\s{2,}", rank_3.strip())
    assert cells == ["rank 3", "3", "24.5 s", "13.8 s", "36.0%", "3 s", "1 A", "1"]


def test_versions_are_counted():
    assert shown(summary(CASES["versions"]()), colour=False).count(" 2\n") == 3


@pytest.mark.parametrize("case", CASES)
def test_no_word_is_cut_off_in_eighty_columns(case):
    assert "…" not in shown(summary(CASES[case]()), colour=False, width=80)


def test_what_rounding_leaves_is_no_idleness():
    """Rank 1 is never idle between its first and last action, but its ends and its work add up differently."""
    costs = {"forward": [1, 1.4, 1, 0.8]}
    line = simulate(schedule("auto", stages=4, microbatches=12, chunks=1, memory=4, **costs), **costs)
    assert 0 < line.idle_own[1] < 1e-12
    assert (
        next(text for text in shown(summary(line), colour=False).splitlines() if "rank 1" in text).count(" 0 s ") == 1
    )


def test_runs_without_a_flush_say_what_one_mini_batch_takes():
    assert headline(simulate(schedule("pipedream", stages=4, microbatches=8, batches=4))) == (
        "pipedream, predicted: 24 s a mini-batch in the steady state, bubble 0.0%; fill and drain 9 s; "
        "makespan 105 s of 4 mini-batches"
    )
    assert headline(simulate(schedule("1f1b", stages=4, microbatches=8, batches=2))) == (
        "1f1b, predicted: 33 s a mini-batch, bubble 27.3%, utilisation 72.7%; makespan 66 s of 2 mini-batches"
    )
    assert headline(simulate(schedule("pipedream", stages=4, batches=2))).endswith(
        "of 2 mini-batches, too few for a steady state; bubble 60.0%, utilisation 40.0%, fill and drain included"
    )


def test_chunks_are_said_where_they_were_chosen():
    said = {"zb-v": "2 chunks a rank placed as a V", "interleaved": "2 chunks a rank interleaved"}
    for name, words in said.items():
        assert headline(simulate(schedule(name, stages=4, microbatches=8))).startswith(f"{name}, {words}, predicted: ")
    alone = schedule("auto", stages=4, microbatches=8, chunks=1)
    assert headline(simulate(alone)).startswith("auto, one chunk a rank, predicted: ")
