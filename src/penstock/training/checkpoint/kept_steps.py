"""The checkpoints of a run from a config, by the steps in their names.

Nothing here needs torch: a run that cannot begin is refused before that is loaded.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from penstock.errors import FormatError, InputError

AUTO = "auto"  # in place of a path to resume from
NAME = "step-{}"
FACTS = "penstock.json"  # in every whole checkpoint
GO_ON = 'go on from there with --resume auto (or resume = "auto"), or give training.checkpoint another path'


def steps_in(folder: str | Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in order."""
    steps = []
    for facts in Path(folder).glob(NAME.format("*") + f"/{FACTS}"):
        number = facts.parent.name.removeprefix(NAME.format(""))
        if number.isdecimal():
            steps.append(int(number))
    return sorted(steps)


def resumed_from(resume: str | None, folder: str | None) -> str | None:
    """Return the path of the checkpoint to resume: for "auto" the newest in the run's folder, None without any."""
    if resume != AUTO:
        return resume
    kept = steps_in(folder) if folder is not None else []
    return str(Path(str(folder)) / NAME.format(kept[-1])) if kept else None


def is_due(done: int, steps: int, every: int | None) -> bool:
    """Return whether a checkpoint is written after so many steps."""
    return done == steps or (every is not None and done % every == 0)


def refuse_early(training: dict[str, Any]) -> None:
    """Raise for a run that has ended, or that would write to an existing path.

    `training` is the section as the file has it; other faults in it are reported when the whole config is read.
    """
    folder, steps, every = training.get("checkpoint"), training.get("steps"), training.get("checkpoint_every")
    resume = training.get("resume")
    if isinstance(resume, str) and resume != AUTO:
        require_checkpoint(resume)
    if not isinstance(folder, str) or not isinstance(steps, int) or not isinstance(every, int | None) or every == 0:
        return
    if not isinstance(resume, str | None):
        return
    path, begun = resumed_from(resume, folder), 0
    if path is not None:
        number = Path(path).name.removeprefix(NAME.format(""))
        if not number.isdecimal():
            return
        begun = int(number)
    require_steps_left(begun, steps, path)
    for step in steps_in(folder):
        if begun < step <= steps and is_due(step, steps, every):
            raise InputError("a path where nothing is yet", f"{Path(folder) / NAME.format(step)}, which exists", GO_ON)


def require_checkpoint(path: str | Path) -> None:
    """Raise for a path without a checkpoint."""
    file = Path(path).absolute() / FACTS
    if not file.is_file():
        came = "a directory without it" if file.parent.is_dir() else "nothing there"
        raise FormatError(str(file), "a checkpoint", came, "give the path that pipe.save() was given")


def require_steps_left(begun: int, steps: int, path: str | None) -> None:
    if begun >= steps:
        expected = f"training.steps to be more than the {begun} that {path} has behind it"
        raise InputError(expected, steps, "train further, or from an earlier checkpoint")


def remove_old(folder: str | Path, keep: int) -> None:
    """Remove all but the newest complete checkpoints; one removed in part no longer counts as one."""
    for step in steps_in(folder)[:-keep]:
        old = Path(folder) / NAME.format(step)
        (old / FACTS).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)
