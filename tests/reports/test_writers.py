"""Every writer draws every sort of timeline."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console
from timelines import CASES, HOSTILE, hostile, plain

from penstock.errors import InputError
from penstock.reports.gantt import gantt
from penstock.reports.grid import grid
from penstock.reports.html import html
from penstock.reports.svg import svg
from penstock.reports.tables import summary
from penstock.reports.trace import trace


def printed(what: object, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


@pytest.fixture(params=CASES)
def line(request):
    return CASES[request.param]()


def test_terminal(line):
    slots = line.schedule.shape.slots
    drawing = str(gantt(line, 80)).splitlines()
    assert all(len(text) <= 80 for text in drawing)
    assert len({len(text) for text in drawing[:slots]}) == 1
    assert len(printed(summary(line)).splitlines()) >= slots
    assert len(str(grid(line.schedule)).splitlines()) == slots


def test_svg(line):
    root = ElementTree.fromstring(svg(line))
    numbers = [
        value for element in root.iter() for value in element.attrib.values() if "nan" in value or "inf" in value
    ]
    assert not numbers
    assert "<style>" in svg(line)


def test_html(line):
    page = html(line)
    assert page.startswith("<!doctype html>")
    assert not re.search(r"https?://", page)
    assert page.count("<script") == 2 == page.count("</script>")


def test_trace(line):
    found = json.loads(trace(line))["traceEvents"]
    assert {event["ph"] for event in found} <= set("MXsfC")
    assert all(event["ts"] >= 0 for event in found if "ts" in event)


def test_a_hostile_name_stays_a_name():
    line = hostile()
    root = ElementTree.fromstring(svg(line))
    assert HOSTILE in root.findtext("{http://www.w3.org/2000/svg}title")
    assert "<script" not in svg(line)
    page = html(line)
    assert "<script>alert" not in page
    embedded = page.split('id="data">')[1].split("</script>")[0]
    assert HOSTILE in json.loads(embedded)["title"]
    assert HOSTILE in printed(summary(line), 400)
    assert HOSTILE in json.loads(trace(line))["traceEvents"][0]["args"]["name"]


@pytest.mark.parametrize("sign", ["\x00", "\x01", "\x1b[2J", "\x7f", "\x9b", "\ud800", "\uffff"])
def test_signs_that_cannot_be_shown_leave_whole_files(sign, tmp_path):
    line = plain()
    named = replace(line, schedule=replace(line.schedule, shape=replace(line.schedule.shape, name=f"a{sign}b")))
    for name, writer in (("svg", svg), ("html", html), ("trace", trace)):
        for what in (named, [(f"c{sign}d", named), ("e", line)]):
            (tmp_path / name).write_text(writer(what), encoding="utf-8")
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert sign not in text
    ElementTree.parse(tmp_path / "svg")
    json.loads((tmp_path / "trace").read_text())
    assert sign not in printed(summary(named))


def test_nothing_to_draw_is_refused():
    with pytest.raises(InputError, match="at least one timeline"):
        svg([])


def test_several_timelines_share_one_axis():
    both = [("a", plain()), ("b", CASES["two chunks"]())]
    labels = [element.text for element in ElementTree.fromstring(svg(both)).iter("{http://www.w3.org/2000/svg}text")]
    assert {"a", "b"} <= set(labels)
    assert '"label":"b"' in html(both)
    names = [e["args"]["name"] for e in json.loads(trace(both))["traceEvents"] if e["name"] == "process_name"]
    assert names == ["a", "b"]
