"""A timeline as one interactive HTML file: zoom, pan and tooltips, without any network access.

A Content-Security-Policy with the hash of the script lets the browser load nothing and run only this script, so that
text from a file cannot run as code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files

from penstock.reports.describe import printable
from penstock.reports.panels import Timelines, panels, title
from penstock.reports.payload import payload
from penstock.reports.svg_parts import escaped

SCRIPTS = ("data.js", "words.js", "view.js", "boxes.js", "memory.js", "scene.js", "tip.js", "input.js", "page.js")


def html(timelines: Timelines, notes: Sequence[str] = ()) -> str:
    """Return the page of one timeline, or of several on one time axis (for example predicted and measured).

    `notes` are lines of plain text below the picture, for example the losses of a training run.
    """
    shown = panels(timelines)
    script = "\n".join(("(() => {", '"use strict";', *map(_asset, SCRIPTS), "})();", ""))
    sheet = _asset("page.css")
    parts = {
        "title": escaped(title(shown)),
        "policy": f"default-src 'none'; img-src data:; style-src {_hash(sheet)}; script-src {_hash(script)}",
        "style": sheet,
        "script": script,
        "notes": f'<pre id="notes">{escaped(chr(10).join(notes))}</pre>' if notes else "",
        "data": _embedded(payload(shown)),
    }
    # In one pass, so that inserted text is not searched for placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _asset("page.html"))


def _embedded(data: object) -> str:
    """Return JSON for use inside a script element, escaped so that it cannot end the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return printable(text).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("penstock.reports") / "assets" / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
