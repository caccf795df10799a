"""A timeline as one HTML file to look around in: zoom, pan, point at things. It asks nothing of any network.

The browser is told to load nothing and to run this one script alone (a Content-Security-Policy with the script's own
hash), so a name that tries to be code stays a name.
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
    """The page of one timeline, or of several over each other on one time axis (predicted over measured, say).

    `notes` are lines of plain text below the picture: the losses of a training run, say.
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
    # In one pass: what is put in is never searched for marks itself.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _asset("page.html"))


def _embedded(data: object) -> str:
    """JSON that can stand inside a script element: no sign of it can end the element or open a comment."""
    said = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return printable(said).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("penstock.reports") / "assets" / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
