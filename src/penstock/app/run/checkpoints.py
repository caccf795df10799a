"""Checkpoints of a run from a config, at intervals and at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock.comm.watch.stderr import write_stderr
from penstock.errors import InputError
from penstock.training.checkpoint.kept_steps import NAME, is_due, remove_old
from penstock.training.pipeline import Pipeline


@dataclass
class PeriodicCheckpoints:
    """The checkpoints of a run. One that cannot be written is reported, and the training goes on.

    A save drains the pipeline, so without a flush more steps are done than the loop has yielded: the checkpoint is
    named after them.
    """

    pipe: Pipeline
    path: str | None
    every: int | None
    steps: int
    keep: int | None = None  # number of newest checkpoints to keep; default: all
    due_at: int = -1  # the step of the last checkpoint
    last: str | None = None  # path of the last one written
    failed: list[str] = field(default_factory=list)

    def require_room(self) -> None:
        """Raise, before the first step, if the directory is not writable or already holds checkpoints of later
        steps."""
        if self.path is not None:
            from penstock.training.checkpoint import save_load  # torch's checkpoint module loads slowly

            save_load.require_room(self.pipe, self.path, self._will_write)

    def after(self, done: int) -> None:
        """Write a checkpoint if one is due after `done` steps."""
        if self.path is None or not self._due(done):
            return
        self.pipe.settle()
        if self.due_at != self.pipe.index:
            self.due_at = self.pipe.index
            self._save(str(Path(self.path) / NAME.format(self.due_at)))

    def _save(self, path: str) -> None:
        try:
            self.pipe.save(path)
        except InputError as error:  # the same on all ranks, whose state is unchanged
            self.failed.append(path)
            if self.pipe.ranks.world.rank == 0:
                last = f"the last one is {self.last}" if self.last else "there is none of this run yet"
                write_stderr(f"penstock: no checkpoint after step {self.due_at}: {error}; {last}\n")
        else:
            self.last = path
            if self.keep is not None and self.pipe.ranks.world.rank == 0:
                remove_old(str(Path(path).parent), self.keep)

    def _due(self, done: int) -> bool:
        return is_due(done, self.steps, self.every)

    def _will_write(self, name: str) -> bool:
        """Whether this run may write a checkpoint of that name. Without a flush, any step may be one."""
        number = name.removeprefix("step-")
        if number == name or not number.isdecimal() or not self.pipe.index < int(number) <= self.steps:
            return False
        return self.pipe.async_trainer is not None or self._due(int(number))
