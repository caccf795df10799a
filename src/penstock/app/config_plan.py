"""A plan's file in place of what a config would say of stages, cuts, chunks, schedule and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.app.config_faults import Fault, shown
from penstock.errors import InputError

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
    from penstock.app.planned import read_plan

    found = read_plan(path)
    plan = found.plan
    says = {"stages": plan.ranks, "microbatches": plan.microbatches, "schedule": plan.schedule, "chunks": plan.chunks}
    return says | {"cuts": None, "options": found.options(options) if isinstance(options, dict) else options}


def _twice(section: Raw) -> Iterator[Fault]:
    from penstock.app.planned import ITS_OWN

    for name in ITS_OWN:
        if section.get(name) is not None:
            expected = "nothing beside pipeline.plan, which says it too"
            yield Fault(f"pipeline.{name}", expected, shown(section[name]), "leave out either")
