"""The picture is to scale, complete, and hides nothing that it was given."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest
from timelines import CASES, plain, predicted

from penstock.core.action import Op
from penstock.reports.boxes import busy
from penstock.reports.hops import hops
from penstock.reports.svg import svg, svg_compare
from penstock.reports.svg_boxes import MOST, NARROWEST

NS = "{http://www.w3.org/2000/svg}"


def of_class(root: ElementTree.Element, tag: str, name: str) -> list[ElementTree.Element]:
    return [element for element in root.iter(NS + tag) if name in element.get("class", "").split()]


def boxes_of(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [box for box in of_class(root, "rect", "box") if "joined" not in box.get("class", "")]


def column(elements: list[ElementTree.Element], name: str) -> np.ndarray:
    return np.array([float(element.get(name)) for element in elements])


@pytest.mark.parametrize(
    "case", ["plain", "measured", "weight gradients apart", "replicas in turns", "overlapped pairs"]
)
def test_boxes_lie_where_their_times_say(case):
    line = CASES[case]()
    root, expected = ElementTree.fromstring(svg(line)), busy(line)
    drawn, ground = boxes_of(root), of_class(root, "rect", "idle")
    left, width = float(ground[0].get("x")), float(ground[0].get("width"))
    scale = width / (line.end.max() - line.start.min())
    assert len(drawn) == len(expected)
    assert column(drawn, "x") == pytest.approx(left + expected.start * scale, abs=2e-3)
    wide = np.maximum((expected.end - expected.start) * scale, NARROWEST)
    assert column(drawn, "width") == pytest.approx(wide, abs=2e-3)
    tops = sorted(column(ground, "y"))
    assert column(drawn, "y") == pytest.approx(np.array(tops)[expected.slot])


def test_pairs_have_two_halves():
    line = CASES["overlapped pairs"]()
    root = ElementTree.fromstring(svg(line))
    halves = of_class(root, "rect", "joined")
    assert len(halves) == (line.schedule.rows.op == Op.FB).sum() > 0


def test_numbers_are_the_microbatches():
    line = plain()
    root = ElementTree.fromstring(svg(line))
    numbers = [element.text for element in of_class(root, "text", "number")]
    boxes = busy(line)
    assert numbers == [str(k) for k in boxes.column("microbatch") if k >= 0]


def test_narrow_boxes_have_no_numbers():
    root = ElementTree.fromstring(svg(predicted("1f1b", 2, 300, {})))
    assert not of_class(root, "text", "number")


def test_transfers_join_their_lines():
    line = plain()
    root, found = ElementTree.fromstring(svg(line)), hops(line)
    drawn = of_class(root, "line", "hop")
    ground = of_class(root, "rect", "idle")
    left, scale = float(ground[0].get("x")), float(ground[0].get("width")) / line.makespan
    assert column(drawn, "x1") == pytest.approx(left + found.start * scale, abs=2e-3)
    assert column(drawn, "x2") == pytest.approx(left + found.end * scale, abs=2e-3)
    assert ((column(drawn, "y2") > column(drawn, "y1")) == (found.target > found.source)).all()


def test_memory_has_a_panel_where_it_was_counted():
    labels = [text.text for text in of_class(ElementTree.fromstring(svg(plain())), "text", "peak")]
    assert labels == ["4 A", "3 A", "2 A", "1 A"]
    assert not of_class(ElementTree.fromstring(svg(CASES["measured"]())), "text", "peak")


def test_the_highest_curve_fills_its_line():
    root = ElementTree.fromstring(svg(plain()))
    path = of_class(root, "path", "kind-activations")[0]
    heights = [float(point.split(",")[1]) for point in path.get("d").strip("MZ").split("L")]
    assert max(heights) - min(heights) == pytest.approx(36, abs=0.1)


def test_legend_names_what_is_drawn_and_nothing_else():
    entries = {text.text for text in of_class(ElementTree.fromstring(svg(plain())), "text", "entry")}
    assert entries == {"F forward", "B full backward", "U weight update", "activations"}


def test_compared_timelines_have_one_scale():
    short, long = predicted("zb-h1", 4, 8, {}), predicted("gpipe", 4, 8, {})
    root = ElementTree.fromstring(svg_compare([("zero bubble", short), ("gpipe", long)]))
    boxes = boxes_of(root)
    ends = column(boxes, "x") + column(boxes, "width")
    split = len(busy(short))
    ground = of_class(root, "rect", "idle")[0]
    left, width = float(ground.get("x")), float(ground.get("width"))
    assert ends[split:].max() - left == pytest.approx(width, abs=1)
    assert ends[:split].max() - left == pytest.approx(width * short.makespan / long.makespan, abs=1)


def test_a_long_timeline_makes_a_picture_of_bounded_size():
    line = predicted("1f1b", 4, 6000, {})
    assert len(busy(line)) > 2 * MOST
    text = svg(line)
    assert len(boxes_of(ElementTree.fromstring(text))) <= 4 * 1200
    assert len(text) < 5_000_000
