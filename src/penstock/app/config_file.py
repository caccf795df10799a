"""A config as a TOML file on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.app.config import Config, read_sections
from penstock.app.config_faults import require_none
from penstock.app.config_plan import with_plan
from penstock.app.config_rules import rules
from penstock.app.config_text import read_raw
from penstock.core.toml_file import require_numbers


def read_config(path: str | Path, changes: dict[str, Any] | None = None) -> Config:
    """The config in a file, with some values in place of the file's (see `read_raw`); all its faults at once."""
    return understood(read_raw(path, changes), str(path))


def understood(raw: dict[str, Any], where: str) -> Config:
    """A config from what a TOML file holds."""
    require_numbers(raw, where)  # those that are put in place of the file's, too
    whole, faults = with_plan(raw)
    found = read_sections(whole)
    require_none(where, [*faults, *found.faults, *rules(found.good)])
    return Config.model_construct(None, **found.sections)
