"""A config in a TOML file, with values that replace the file's, and with the values of a plan's file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.app.config.rules import rules
from penstock.app.config.schema import Config, ConfigFault, raise_faults, read_sections, shown
from penstock.core.toml_file import read_toml, require_numbers
from penstock.errors import InputError


def read_raw(path: str | Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read a TOML file and apply changes. A change's key is dotted; one without a dot replaces a whole section."""
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
# Placeholders for the values of a faulty plan, so that they are not reported as missing.
ANY: Raw = {"stages": 1, "replicas": 1, "microbatches": 1, "schedule": "1f1b", "options": {}}


def with_plan(raw: Raw) -> tuple[Raw, list[ConfigFault]]:
    """Return the config with the values of its plan, if it names one, and the plan's faults."""
    section = raw.get("pipeline")
    path = section.get("plan") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(path, str) or not path:
        return raw, []
    try:
        planned, faults = _plan_values(path, section.get("options", {})), list(_duplicates(section))
    except InputError as error:
        planned, faults = ANY, [ConfigFault(f"pipeline.plan ({path})", error.expected, str(error.came), error.do)]
    return raw | {"pipeline": section | planned}, faults


def _plan_values(path: str, options: Any) -> Raw:
    from penstock.training.plan_options import read_plan

    given = read_plan(path)
    plan = given.plan
    planned = {
        "stages": plan.ranks,
        "replicas": list(plan.replicas),
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "chunks": plan.chunks,
    }
    return planned | {"cuts": None, "options": given.options(options) if isinstance(options, dict) else options}


def _duplicates(section: Raw) -> Iterator[ConfigFault]:
    from penstock.training.plan_options import ITS_OWN

    for name in ITS_OWN:
        if section.get(name) is not None:
            expected = "nothing beside pipeline.plan, which sets it too"
            yield ConfigFault(f"pipeline.{name}", expected, shown(section[name]), "leave out either")


def read_config(path: str | Path, changes: dict[str, Any] | None = None) -> Config:
    """Read a config from a file with some values replaced (see `read_raw`); report all its faults at once."""
    return build_config(read_raw(path, changes), str(path))


def build_config(raw: dict[str, Any], where: str) -> Config:
    """Build a config from the content of a TOML file."""
    require_numbers(raw, where)  # also in values that replace the file's
    whole, faults = with_plan(raw)
    parsed = read_sections(whole)
    raise_faults(where, [*faults, *parsed.faults, *rules(parsed.good)])
    return Config.model_construct(None, **parsed.sections)
