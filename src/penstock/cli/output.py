"""Output to the terminal and to files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.reports.panels import Timelines


def write_files(**files: tuple[Path | None, Callable[[], str]]) -> None:
    """Write the text that each function returns to its file, for those that are not None."""
    for file, text in files.values():
        if file is not None:
            file.write_text(text(), encoding="utf-8")
            typer.echo(f"wrote {file}", err=True)


def draw(line: Timelines, **files: Path | None) -> None:
    """Draw a timeline, or several, to the files of `svg`, `html` and `trace` that are not None."""
    from penstock.reports.html import html
    from penstock.reports.svg import svg
    from penstock.reports.trace import trace

    for kind, writer in (("svg", svg), ("html", html), ("trace", trace)):
        file = files[kind]
        if file is not None:
            try:
                file.write_text(writer(line), encoding="utf-8")
            except OSError as error:
                raise InputError(
                    f"a file that can be written for --{kind}", f"{file}: {error.strerror}", "change the path"
                ) from None
            typer.echo(f"wrote {file}", err=True)


def terminal() -> Any:
    """Return a console on standard output."""
    from rich.console import Console

    return Console()
