"""The page as text: it stands by itself, and lets nothing in."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import numpy as np
import pytest
from timelines import CASES, hostile, plain

from penstock.reports.html import html
from penstock.reports.payload import pack


def embedded(page: str) -> dict:
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


@pytest.mark.parametrize(
    ("values", "kind"),
    [([0, 1, 127], "i1"), ([-1, 128], "i2"), ([70_000], "i4"), ([0.5, 1e9], "f8"), ([], "f8")],
)
def test_columns_are_packed_in_the_fewest_bytes(values, kind):
    packed = pack(np.array(values))
    assert packed["type"] == kind
    assert np.frombuffer(base64.b64decode(packed["data"]), dtype=f"<{kind}").tolist() == values


@pytest.mark.parametrize("make", [plain, hostile])
def test_only_its_own_script_and_style_may_run(make):
    page = html(make())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; img-src data:; ")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        content = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_nothing_in_the_data_can_end_its_element():
    page = html(hostile())
    data = page.split('id="data">')[1].split("</script>")[0]
    assert not set("<>&") & set(data)


def test_notes_are_plain_text_below_the_picture():
    page = html(plain(), ["validation loss 1.5 & less", "</pre><script>alert(1)</script>", "{{data}}"])
    notes = re.search(r'<pre id="notes">(.*?)</pre>', page, re.DOTALL)[1]
    assert notes.split("\n") == [
        "validation loss 1.5 &amp; less",
        "&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;",
        "{{data}}",
    ]
    assert page.count("<script>") == 1
    assert 'id="notes"' not in html(plain())


def test_data_holds_the_actions():
    line = plain()
    data = embedded(html(line))
    boxes = {
        name: np.frombuffer(base64.b64decode(c["data"]), f"<{c['type']}")
        for name, c in data["panels"][0]["boxes"].items()
    }
    assert len(boxes["op"]) == 4 * (2 * 8 + 1)
    assert boxes["end"].max() == pytest.approx(line.makespan)
    assert dict(data["panels"][0]["figures"])["makespan"] == "38.3 s"


def test_data_is_compact():
    line = CASES["weight gradients apart"]()
    long = html(line)
    assert len(long) - len(html(CASES["empty"]())) < 100 * len(line.schedule) + 10_000
