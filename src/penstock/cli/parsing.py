"""Parse numbers, schedules and timelines from flags and files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import FormatError, InputError

if TYPE_CHECKING:
    from penstock.core.schedule import Schedule
    from penstock.core.timeline import Timeline


def built_schedule(
    name: str,
    stages: int | None,
    microbatches: int | None,
    batches: int | None,
    chunks: int | None,
    replicas: str,
    options: dict[str, Any],
) -> Schedule:
    """Return the schedule of a method from the values of its flags."""
    from penstock.schedules.registry import schedule

    if stages is None:
        raise InputError(f"a number of stages for {name}", "none", "give --stages")
    try:
        counts = [int(count) for count in replicas.split(",")]
    except ValueError:
        raise InputError("--replicas to be whole numbers", repr(replicas), "write it like 2 or 3,1") from None
    return schedule(
        name,
        stages=stages,
        microbatches=microbatches,
        batches=batches,
        chunks=chunks,
        replicas=counts[0] if len(counts) == 1 else counts,
        **options,
    )


def method_options(
    name: str,
    policy: str | None,
    cap: int | None,
    overlap: bool,
    vertical_sync: bool,
    no_stash: bool,
    memory: str | None,
    costs: dict[str, Any],
) -> dict[str, Any]:
    """Return the options of a method whose flags were used. The method refuses those it does not have."""
    most = None if memory is None else numbers("memory", memory)
    flags: dict[str, Any] = {"policy": policy, "cap": cap, "memory": most}
    flags |= {"overlap": overlap or None, "vertical_sync": vertical_sync or None, "stash": False if no_stash else None}
    options = {option: value for option, value in flags.items() if value is not None}
    return options | costs if name == "auto" else options


def stage_costs(
    forward: str, input_grad: str, weight_grad: str, transfer: str, weight_grad_memory: float
) -> dict[str, Any]:
    """Return the keyword arguments of `flat_costs` from the texts of their flags."""
    return {
        "forward": numbers("forward", forward),
        "input_grad": numbers("input-grad", input_grad),
        "weight_grad": numbers("weight-grad", weight_grad),
        "transfer": numbers("transfer", transfer),
        "weight_grad_memory": weight_grad_memory,
    }


def numbers(flag: str, text: str) -> list[float]:
    """Return the numbers in a flag's text, separated by commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"--{flag} to be a number, or several with commas", repr(text), "write it like 1,1.5,1"
        ) from None


def read_schedule(file: Path) -> Schedule:
    """Return the schedule in a CSV file, in penstock's or PyTorch's format."""
    from penstock.core.text import from_csv
    from penstock.core.torch_text import from_torch_csv, is_torch_csv

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise FormatError(str(file), "a readable CSV file", reason, "check the path and the file") from None
    return (from_torch_csv if is_torch_csv(text) else from_csv)(text, str(file))


def read_timeline(file: Path) -> Timeline:
    """Return the timeline in a JSON file."""
    from penstock.core.json_file import read_json
    from penstock.core.timeline import Timeline

    return read_json(file, "timeline", Timeline.from_json, "write it with Timeline.to_json")


def require_there(path: Path, what: str) -> None:
    """Refuse a path with nothing there, before anything long begins."""
    if not path.exists():
        raise FormatError(str(path), what, "nothing there", "check the path")
