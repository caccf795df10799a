"""A config as a TOML file, with values that replace the file's, and with a plan's file for the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.app.config.rules import rules
from penstock.app.config.schema import Config, Fault, read_sections, require_none, shown
from penstock.core.toml_file import read_toml, require_numbers
from penstock.errors import InputError


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


Raw = dict[str, Any]
# So that nobody misses what a plan at fault does not say.
ANY: Raw = {"stages": 1, "microbatches": 1, "schedule": "1f1b", "options": {}}


def with_plan(raw: Raw) -> tuple[Raw, list[Fault]]:
    """The config with the plan's values in it, if it names one, and what is wrong with that."""
    section = raw.get("pipeline")
    path = section.get("plan") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(path, str) or not path:
        return raw, []
    try:
        says, faults = _says(path, section.get("options", {})), list(_twice(section))
    except InputError as error:
        says, faults = ANY, [Fault(f"pipeline.plan ({path})", error.expected, str(error.came), error.do)]
    return raw | {"pipeline": section | says}, faults


def _says(path: str, options: Any) -> Raw:
    from penstock.training.plan_options import read_plan

    found = read_plan(path)
    plan = found.plan
    says = {"stages": plan.ranks, "microbatches": plan.microbatches, "schedule": plan.schedule, "chunks": plan.chunks}
    return says | {"cuts": None, "options": found.options(options) if isinstance(options, dict) else options}


def _twice(section: Raw) -> Iterator[Fault]:
    from penstock.training.plan_options import ITS_OWN

    for name in ITS_OWN:
        if section.get(name) is not None:
            expected = "nothing beside pipeline.plan, which says it too"
            yield Fault(f"pipeline.{name}", expected, shown(section[name]), "leave out either")


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
