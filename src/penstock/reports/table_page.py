"""A table and pictures as one HTML file, without network access or scripts."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape

from penstock.reports.svg_parts import escaped

_SHEET = """
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  margin: 2rem auto; max-width: 1240px; padding: 0 1rem; color: #1f2630; background: #ffffff }
h1 { font-size: 1.3rem; margin: 0 0 .3rem } p { margin: .3rem 0; color: #57606a }
.wide { overflow-x: auto; margin: 1.2rem 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #d5dae0 }
th { font-weight: 600 } th:first-child, td:first-child { text-align: left }
svg { max-width: 100%; height: auto }
@media (prefers-color-scheme: dark) {
  body { color: #e6edf3; background: #0b0f14 } p { color: #9aa5b1 } th, td { border-color: #2b333d }
}
"""


def table_page(
    title: str, lines: Sequence[str], heads: Sequence[str], rows: Sequence[Sequence[str]], pictures: Sequence[str]
) -> str:
    """Return a page with `lines` of text above the table, and `pictures`, SVG documents, unchanged below it."""
    sheets = [_SHEET, *(sheet for picture in pictures for sheet in re.findall(r"<style>(.*?)</style>", picture, re.S))]
    policy = f"default-src 'none'; style-src {' '.join(dict.fromkeys(map(_hash, sheets)))}"
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escaped(title)}</title><style>{_SHEET}</style></head><body>",
            f"<h1>{escaped(title)}</h1>",
            *(f"<p>{escaped(line)}</p>" for line in lines),
            '<div class="wide"><table><thead>',
            _row("th", heads),
            "</thead><tbody>",
            *(_row("td", row) for row in rows),
            "</tbody></table></div>",
            *pictures,
            "</body></html>\n",
        )
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escaped(cell)}</{tag}>" for cell in cells) + "</tr>"


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
