"""Loss against samples and time: one line a method in both pictures, readable on light and dark, safe to embed."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from penstock.errors import InputError
from penstock.reports.loss_chart import COLOURS, LossCurve, loss_chart, smooth
from penstock.reports.palette import contrast
from penstock.reports.table_page import table_page

SVG = "{http://www.w3.org/2000/svg}"


def curve(name="1f1b", losses=(4.0, 3.0, 2.0), seconds=None):
    seconds = [0.5 * (at + 1) for at in range(len(losses))] if seconds is None else seconds
    return LossCurve(name, [16.0 * (at + 1) for at in range(len(losses))], seconds, losses)


def lines(picture):
    tree = ElementTree.fromstring(picture)
    found = []
    for line in tree.iter(f"{SVG}polyline"):
        points = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
        found.append((line.get("class"), points))
    return found


def words(picture):
    return [element.text for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_every_method_is_drawn_twice_in_its_own_colour():
    picture = loss_chart([curve(), curve("2bw", (4.0, 3.5, 3.0))], "two methods", "measured")
    found = lines(picture)
    assert [name for name, _ in found] == ["line m0 d0", "line m1 d0"] * 2
    assert all(len(points) == 3 for _, points in found)
    left, right = max(x for _, points in found[:2] for x, _ in points), min(x for x, _ in found[2][1])
    assert left < right, "samples left, time right"
    said = words(picture)
    assert {"1f1b", "2bw", "samples", "time, measured", "two methods"} <= set(said)


def test_loss_goes_up_and_time_goes_right():
    (_, samples), (_, times) = lines(loss_chart([curve(losses=(4.0, 2.0), seconds=[1.0, 4.0])], "t", "simulated"))
    assert samples[0][1] < samples[1][1], "the higher loss is higher up"
    assert times[1][0] > times[0][0]
    span = times[1][0] - times[0][0]
    assert span == pytest.approx(0.75 * (times[1][0] - 626), rel=0.1), "in proportion to the seconds"


def test_a_method_that_diverges_leaves_at_the_top():
    picture = loss_chart([curve(), curve("wild", (4.0, 1e30, math.nan))], "t", "measured")
    for _, points in lines(picture):
        assert all(math.isfinite(y) and y >= 0 for _, y in points)
    assert [len(points) for _, points in lines(picture)] == [3, 2, 3, 2]
    with pytest.raises(InputError, match="at least one method with a finite loss"):
        loss_chart([curve(losses=(math.nan,))], "t", "measured")
    with pytest.raises(InputError, match="at least one method"):
        loss_chart([curve(losses=())], "t", "measured")


def test_one_flat_point_can_be_drawn():
    assert len(lines(loss_chart([curve(losses=(2.0,))], "t", "measured"))) == 2


def test_smoothing_is_the_mean_of_some_before():
    assert smooth([1.0, 2.0, 3.0]).tolist() == [1.0, 2.0, 3.0]
    found = smooth([float(at) for at in range(50)])
    assert found[:3].tolist() == [0.0, 0.5, 1.5]
    assert found[-1] == 48.5
    assert len(lines(loss_chart([curve(losses=[1.0 + at for at in range(5000)])], "t", "m"))[0][1]) == 600


def test_more_methods_than_colours_are_told_apart_by_dashes():
    picture = loss_chart([curve(f"method {at}") for at in range(13)], "t", "measured")
    assert len({name for name, _ in lines(picture)}) == 13


@pytest.mark.parametrize("colour", COLOURS)
def test_lines_stand_out_on_light_and_dark(colour):
    assert contrast(colour, "#ffffff") >= 3
    assert contrast(colour, "#0f141a") >= 3


def test_names_stay_names():
    picture = loss_chart([curve('<script>alert("x")</script>')], "a < b & c", "measured")
    assert "<script" not in picture
    page = table_page("a <b>", ["1 & 2"], ["<i>"], [["<script>1</script>", "x"]], [picture])
    assert "<script" not in page
    assert "a &lt;b&gt;" in page


def test_the_page_holds_all_and_allows_nothing_else():
    page = table_page("title", ["said"], ["method", "loss"], [["1f1b", "3.1"]], [loss_chart([curve()], "t", "m")])
    assert page.startswith("<!doctype html>")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    assert policy.startswith("default-src &#x27;none&#x27;; style-src ")
    assert policy.count("sha256-") == len(re.findall("<style>", page)) == 2
    assert not re.search(r"""(src|href)=|https?://(?!www\.w3\.org/2000/svg)""", page)
    assert "<td>1f1b</td><td>3.1</td>" in page
