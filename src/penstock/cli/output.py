"""Where results go: the terminal, and files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.reports.panels import Timelines


def write_files(**files: tuple[Path | None, Callable[[], str]]) -> None:
    for file, made in files.values():
        if file is not None:
            file.write_text(made(), encoding="utf-8")
            typer.echo(f"wrote {file}", err=True)


def draw(line: Timelines, **files: Path | None) -> None:
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
    from rich.console import Console

    return Console()
