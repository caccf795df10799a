"""What a config's TOML file holds, with some values in place of the file's: before anybody has looked at it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from penstock.errors import FormatError


def read_raw(path: str | Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A change's key is dotted; one without a dot stands for a whole section."""
    raw = _parsed(Path(path))
    for key, value in (changes or {}).items():
        section, _, name = key.partition(".")
        if not name:
            raw[section] = value
            continue
        given = raw.setdefault(section, {})
        if isinstance(given, dict):
            given[name] = value
    return raw


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(str(path), "a readable TOML file", error.strerror, "check the path") from None
    except UnicodeDecodeError:
        raise FormatError(str(path), "a TOML file in UTF-8", "another encoding", "save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        said, line = str(error), re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        where = f"{path}:{line[1]}:{line[2]}" if line else str(path)
        what = said[: line.start()].strip() if line else said
        raise FormatError(where, "TOML", what[:1].lower() + what[1:], "correct the line") from None
