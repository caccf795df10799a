"""Whether a config's schedule can be built for its stages and micro-batches, with the options that it gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.app.config_faults import Fault, nearest
from penstock.errors import InputError

NOT_HERE = {"costs", "seed"}  # of auto: no TOML can say the one, and the other is pipeline.seed
NEEDED = ("schedule", "stages", "microbatches", "chunks", "cuts", "options")


def schedule_faults(good: dict[str, Any]) -> Iterator[Fault]:
    """What is wrong with the schedule and its options, each by its own path."""
    from penstock.schedules.registry import find

    found = {key: good.get(f"pipeline.{key}", 0) for key in NEEDED}
    try:
        if found["schedule"]:
            find(found["schedule"])
    except InputError as error:
        yield _fault("pipeline.schedule", error)
        return
    if 0 in [found[key] for key in NEEDED if key != "options"]:
        return
    options = found["options"] if isinstance(found["options"], dict) else {}
    unknown = list(_unknown(found["schedule"], options))
    yield from unknown
    refused = None if unknown else _refusal(found, options)
    if refused is not None:
        yield from _blamed(found, options, refused)


def _unknown(schedule: str, options: dict[str, Any]) -> Iterator[Fault]:
    from penstock.app.remedies import NAMES
    from penstock.schedules.registry import find

    method = find(schedule)
    known = {*method.options, *(NAMES if method.asynchronous else ())} - NOT_HERE
    for name in options:
        if name in NAMES and not method.asynchronous:
            came = f"{method.name}, which is synchronous"
            yield Fault(f"pipeline.options.{name}", "an asynchronous schedule", came, "leave it out")
        elif name not in known:
            do = nearest(name, known) if known else "leave it out: it has none"
            yield Fault(f"pipeline.options.{name}", f"an option of {method.name}", "an unknown one", do)


def _blamed(found: dict[str, Any], options: dict[str, Any], refused: InputError) -> Iterator[Fault]:
    """Whose fault it is: the schedule's without options, some single option's, or that of all together."""
    bare = _refusal(found, {})
    if bare is not None:
        yield _fault("pipeline", bare)
        return
    single = {name: _refusal(found, {name: value}) for name, value in options.items()}
    wrong = [_fault(f"pipeline.options.{name}", error) for name, error in single.items() if error is not None]
    yield from wrong or [_fault("pipeline.options", refused)]


def _refusal(found: dict[str, Any], options: dict[str, Any]) -> InputError | None:
    """What is said of the schedule with these options."""
    from penstock.app.remedies import read_remedies, without_remedies
    from penstock.app.settings import Asked, read_schedule

    named = (found["schedule"], found["stages"], found["microbatches"], found["chunks"])
    try:
        built = read_schedule(Asked(*named, without_remedies(options)), found["cuts"])
        read_remedies(options, built.shape)
    except InputError as error:
        return error
    return None


def _fault(path: str, error: InputError) -> Fault:
    return Fault(path, error.expected, str(error.came), error.do)
