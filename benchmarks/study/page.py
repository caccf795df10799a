"""Puts the tables into docs/convergence.md, behind the marks that name them, and what all runs have cost."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.study.plan import Line
from benchmarks.study.table import tables

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURES = DOCS / "convergence.md", DOCS / "pictures"


def write(lines: list[Line]) -> None:
    PAGE.write_text(filled(PAGE.read_text(), lines))


def cost(lines: list[Line]) -> str:
    return f"{sum(line['cpu'] for line in lines) / 60:.0f} CPU minutes"


def filled(page: str, lines: list[Line]) -> str:
    for name, table in tables(lines).items():
        mark = f"<!-- {name} -->\n"
        page = re.sub(rf"{re.escape(mark)}(\|.*\n)*", lambda _, new=mark + table: new, page)
    return re.sub(r"\d+ CPU minutes", cost(lines), page)
