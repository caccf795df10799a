"""What a config's TOML file holds, with some values in place of the file's: before anybody has looked at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.core.toml_file import read_toml


def read_raw(path: str | Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A change's key is dotted; one without a dot stands for a whole section."""
    raw = read_toml(Path(path), "TOML file")
    for key, value in (changes or {}).items():
        section, _, name = key.partition(".")
        if not name:
            raw[section] = value
            continue
        given = raw.setdefault(section, {})
        if isinstance(given, dict):
            given[name] = value
    return raw
