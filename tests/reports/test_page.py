"""The page in a browser: it draws, moves and answers, and asks nothing of any network."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from timelines import CASES, hostile, plain, predicted

from browsers import SIZE, Page, chromium, needs_chromium
from penstock.reports.boxes import busy
from penstock.reports.describe import WORDS
from penstock.reports.html import html
from penstock.reports.panels import Timelines

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium() as opened:
        yield opened


@pytest.fixture
def open_page(browser, tmp_path) -> Iterator:
    opened: list[Page] = []

    def open_(timelines: Timelines, **context) -> Page:
        file = tmp_path / f"{len(opened)}.html"
        file.write_text(html(timelines), encoding="utf-8")
        opened.append(Page(browser, file, **context))
        return opened[-1]

    yield open_
    for page in opened:
        page.close()


@pytest.mark.parametrize("case", CASES)
def test_every_sort_of_timeline_is_drawn(open_page, case):
    line = CASES[case]()
    page = open_page(line)
    assert page.get("rows()") == line.schedule.shape.slots
    assert page.get("rows(0, 'memory')") == (0 if line.memory is None else line.schedule.shape.slots)
    assert (page.get("drawn.boxes") > 0) == (len(line.schedule) > 0)
    page.tab.mouse.move(600, 500)
    page.wheel(-300, "Control")


def test_pointing_tells_every_action(open_page):
    """Each box of each slot: its word and its details are those of the schedule."""
    line = CASES["overlapped pairs"]()
    page, boxes = open_page(line), busy(line)
    for box in range(0, len(boxes), 3):
        if boxes.end[box] == boxes.start[box]:
            continue
        page.point(int(boxes.slot[box]), float(boxes.start[box] + boxes.end[box]) / 2)
        action, told = boxes.action(box), page.get("hovered")
        assert told["word"] == str(action)
        assert told["details"]["operation"] == WORDS[action.op]
        assert told["details"]["stage"] == action.stage
        assert told["details"]["slot"] == f"rank {int(boxes.slot[box])}"


def test_the_note_shows_the_details(open_page):
    page = open_page(CASES["versions"]())
    page.point(0, 10.5)
    told, note = page.get("hovered"), page.tab.locator("#tip")
    assert note.is_visible()
    assert note.locator("strong").inner_text() == told["word"]
    expected = ["operation", "stage", "slot", "micro-batch", "mini-batch", "weight version", "start", "end", "duration"]
    assert note.locator("th").all_inner_texts() == expected
    page.tab.mouse.move(5, 5)
    page.settle()
    assert note.is_hidden()


def test_words_are_those_of_the_library(open_page):
    """With weight versions, replicas, transfers and reductions."""
    line = CASES["replicas in turns"]()
    page, boxes = open_page(line), busy(line)
    for box in range(len(boxes)):
        if boxes.end[box] > boxes.start[box]:
            page.point(int(boxes.slot[box]), float(boxes.start[box] + boxes.end[box]) / 2)
            assert page.get("hovered.word") == str(boxes.action(box))


def test_idle_time_tells_what_is_waited_for(open_page):
    page = open_page(plain())
    page.point(0, 8.0)
    assert page.get("hovered.word") == "0B0<1"
    page.point(3, 37.0)
    assert page.get("hovered.word") == "idle"
    assert page.get("hovered.details.end") == "38.3 s"


@pytest.mark.parametrize("key", ["Control", "Meta"])
def test_the_wheel_zooms_where_it_points_with_ctrl_or_cmd(open_page, key):
    line = plain()
    page = open_page(line)
    assert page.get("view") == pytest.approx({"t0": 0, "t1": line.makespan})
    x, y = page.point(1, 10.0)
    page.wheel(-400, key)
    view = page.get("view")
    assert view["t1"] - view["t0"] < 0.6 * line.makespan
    assert page.tab.evaluate("penstock.place(0, 1, 10.0)")["x"] == pytest.approx(x, abs=2)  # mice point at whole pixels
    page.tab.mouse.dblclick(x, y)
    page.settle()
    assert page.get("view") == pytest.approx({"t0": 0, "t1": line.makespan})


def test_the_wheel_alone_scrolls_the_page(open_page):
    """It once zoomed, so that a reader who scrolled down over the picture lost both the place and the view."""
    page = open_page(plain(), viewport={"width": 900, "height": 300})
    before = page.get("view")
    page.point(0, 10.0)
    page.wheel(150)
    page.tab.wait_for_function("scrollY > 0")
    assert page.get("view") == before


def test_the_wheel_zooms_over_the_axis(open_page):
    page = open_page(plain(), viewport={"width": 900, "height": 300})
    box = page.tab.locator("#axis").bounding_box()
    page.tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    before = page.get("view")
    page.wheel(-400)
    after = page.get("view")
    assert after["t1"] - after["t0"] < 0.6 * (before["t1"] - before["t0"])
    assert page.tab.evaluate("scrollY") == 0


def test_a_wheel_held_sideways_moves_along(open_page):
    page = open_page(plain())
    page.point(0, 10.0)
    page.wheel(-400, "Control")
    before = page.get("view")
    page.wheel(100, "Shift")
    after = page.get("view")
    assert after["t0"] > before["t0"]
    assert after["t1"] - after["t0"] == pytest.approx(before["t1"] - before["t0"])


def test_dragging_pans(open_page):
    page = open_page(plain())
    page.tab.locator("#canvas").focus()
    page.tab.keyboard.press("+")
    page.settle()
    before = page.get("view")
    page.tab.mouse.move(700, 400)
    page.tab.mouse.down()
    page.tab.mouse.move(600, 400, steps=4)
    page.tab.mouse.up()
    page.settle()
    after = page.get("view")
    assert after["t0"] > before["t0"]
    assert after["t1"] - after["t0"] == pytest.approx(before["t1"] - before["t0"])


def test_keys_zoom_pan_and_reset(open_page):
    line = plain()
    page = open_page(line)
    page.tab.locator("#canvas").focus()

    def press(key: str) -> dict[str, float]:
        page.tab.keyboard.press(key)
        page.settle()
        return page.get("view")

    near = press("+")
    assert near["t1"] - near["t0"] == pytest.approx(line.makespan / 2)
    right = press("ArrowRight")
    assert right["t0"] > near["t0"]
    assert press("ArrowLeft") == pytest.approx(near)
    assert press("-") == pytest.approx({"t0": 0, "t1": line.makespan})
    press("+")
    assert press("0") == pytest.approx({"t0": 0, "t1": line.makespan})


def test_keys_walk_from_action_to_action(open_page):
    page = open_page(plain())
    page.tab.locator("#canvas").focus()
    words = []
    for key in (".", ".", ".", ",", "ArrowDown"):
        page.tab.keyboard.press(key)
        page.settle()
        words.append(page.get("hovered.word"))
    assert words[:4] == ["0F0", "0F1", "0F2", "0F1"]
    assert words[4].startswith("1F")


def test_a_click_follows_a_microbatch(open_page):
    page = open_page(plain())
    x, y = page.point(0, 2.5)
    page.tab.mouse.click(x, y)
    assert page.get("pinned") == 2
    page.tab.keyboard.press("Escape")
    assert page.get("pinned") == -1


def test_memory_is_read_out(open_page):
    page = open_page(CASES["in bytes"]())
    page.point(0, 3.5, "memory")
    told = page.get("hovered.details")
    assert told["weights"] == "3 MiB"
    assert told["optimizer state"] == "6 MiB"
    assert re.fullmatch(r"[\d.]+ MiB", told["together"])
    page.tab.locator("#memory").uncheck()
    page.settle()
    assert page.get("rows(0, 'memory')") == 0


def test_transfers_can_be_hidden(open_page):
    page = open_page(plain())
    assert page.get("drawn.hops") > 0
    page.tab.locator("#hops").uncheck()
    page.settle()
    assert page.get("drawn.hops") == 0


def test_a_hostile_name_does_nothing(open_page):
    page = open_page(hostile())
    assert "alert(1)" in page.tab.locator("#title").inner_text()
    assert page.tab.locator("script").count() == 2


def test_two_timelines_stand_over_each_other(open_page):
    page = open_page([("predicted", plain()), ("measured", CASES["measured"]())])
    assert [page.get(f"rows({panel})") for panel in (0, 1)] == [4, 4]
    page.point(2, 8.0, panel=0)
    above = page.get("hovered.word")
    page.point(2, 8.0, panel=1)
    assert page.get("hovered.word") == above
    assert page.tab.locator("h2").all_inner_texts() == ["predicted", "measured"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(open_page, scheme):
    page = open_page(CASES["overlapped pairs"](), viewport={"width": 360, "height": 740}, color_scheme=scheme)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= 360
    ground = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 20, 26)"}[scheme]


def test_many_actions_stay_quick(open_page):
    """Over 10,000 actions: a frame draws no more boxes than there are pixels or boxes in view."""
    line = predicted("1f1b", 8, 1500, {}, transfer=0.1)
    assert len(busy(line)) > 20_000
    page = open_page(line)
    assert page.get("drawn.boxes") <= 8 * SIZE["width"]
    page.tab.locator("#canvas").focus()
    for _ in range(8):
        page.tab.keyboard.press("+")
    page.settle()
    view = page.get("view")
    inside = (busy(line).end >= view["t0"]) & (busy(line).start <= view["t1"])
    assert 0 < page.get("drawn.boxes") <= inside.sum() + 8
    assert inside.sum() < 400
    began, frames = time.monotonic(), page.get("drawn.frames")
    for _ in range(20):
        page.tab.keyboard.press("ArrowRight")
        page.settle()
    assert page.get("drawn.frames") >= frames + 20
    assert time.monotonic() - began < 20
    assert page.get("drawn.ms") < 200
