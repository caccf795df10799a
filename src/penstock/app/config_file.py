"""A config as a TOML file on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.app.config import Config, read_sections
from penstock.app.config_faults import require_none
from penstock.app.config_plan import with_plan
from penstock.app.config_rules import rules
from penstock.core.toml_file import read_toml, require_numbers


def read_config(path: str | Path, changes: dict[str, Any] | None = None) -> Config:
    """The config in a file, with some values in place of the file's; all its faults at once.

    A change's key is dotted; one without a dot stands for a whole section.
    """
    raw = read_toml(Path(path), "TOML file")
    for key, value in (changes or {}).items():
        section, _, name = key.partition(".")
        if not name:
            raw[section] = value
            continue
        given = raw.setdefault(section, {})
        if isinstance(given, dict):
            given[name] = value
    return understood(raw, str(path))


def understood(raw: dict[str, Any], where: str) -> Config:
    """A config from what a TOML file holds."""
    require_numbers(raw, where)  # those that are put in place of the file's, too
    whole, faults = with_plan(raw)
    found = read_sections(whole)
    require_none(where, [*faults, *found.faults, *rules(found.good)])
    return Config.model_construct(None, **found.sections)
