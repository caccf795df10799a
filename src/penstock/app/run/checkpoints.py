"""Checkpoints of a run from a config: every so many steps, and at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock.comm.watch.stderr import say
from penstock.errors import InputError
from penstock.training.checkpoint.kept_steps import NAME, is_due, remove_old
from penstock.training.pipeline import Pipeline


@dataclass
class Keep:
    """Writes them when it is time to. One that cannot be written is reported, and the training goes on.

    A save drains the pipe, so without a flush more steps are behind it than have been told: it is named for those.
    """

    pipe: Pipeline
    path: str | None
    every: int | None
    steps: int
    keep: int | None = None  # how many of the newest; all unless said
    seen: int = -1  # the step at which one was last due
    last: str | None = None  # that was written
    failed: list[str] = field(default_factory=list)

    def require_room(self) -> None:
        """Before the first step: a directory that can be written to, with nothing where checkpoints will come."""
        if self.path is not None:
            from penstock.training.checkpoint import (
                save_load,  # not at the top: torch's part of it takes long to import
            )

            save_load.require_room(self.pipe, self.path, self._will_write)

    def after(self, done: int) -> None:
        if self.path is None or not self._due(done):
            return
        self.pipe.settle()
        if self.seen != self.pipe.index:
            self.seen = self.pipe.index
            self._save(str(Path(self.path) / NAME.format(self.seen)))

    def _save(self, path: str) -> None:
        try:
            self.pipe.save(path)
        except InputError as error:  # the same on all ranks, which are all as they were
            self.failed.append(path)
            if self.pipe.crew.world.rank == 0:
                last = f"the last one is {self.last}" if self.last else "there is none of this run yet"
                say(f"penstock: no checkpoint after step {self.seen}: {error}; {last}\n")
        else:
            self.last = path
            if self.keep is not None and self.pipe.crew.world.rank == 0:
                remove_old(str(Path(path).parent), self.keep)

    def _due(self, done: int) -> bool:
        return is_due(done, self.steps, self.every)

    def _will_write(self, name: str) -> bool:
        """Without a flush it is not known which steps there will be one of."""
        number = name.removeprefix("step-")
        if number == name or not number.isdecimal() or not self.pipe.index < int(number) <= self.steps:
            return False
        return self.pipe.async_trainer is not None or self._due(int(number))
