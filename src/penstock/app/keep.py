"""Checkpoints of a run from a config: every so many steps, and at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.app.kept_steps import NAME, is_due, remove_old
from penstock.app.pipeline import Pipeline


@dataclass
class Keep:
    """Writes them when it is time to.

    A save drains the pipe, so without a flush more steps are behind it than have been told: it is named for those.
    """

    pipe: Pipeline
    path: str | None
    every: int | None
    steps: int
    keep: int | None = None  # how many of the newest; all unless said
    saved: int = -1

    def require_room(self) -> None:
        """Before the first step: a directory that can be written to, with nothing where checkpoints will come."""
        if self.path is not None:
            from penstock.app import checkpoint  # not at the top: torch's part of it takes long to import

            checkpoint.require_room(self.pipe, self.path, self._will_write)

    def after(self, done: int) -> None:
        if self.path is None or not self._due(done):
            return
        self.pipe.settle()
        if self.saved != self.pipe.index:
            self.saved = self.pipe.index
            self.pipe.save(str(Path(self.path) / NAME.format(self.saved)))
            if self.keep is not None and self.pipe.crew.world.rank == 0:
                remove_old(self.path, self.keep)

    def _due(self, done: int) -> bool:
        return is_due(done, self.steps, self.every)

    def _will_write(self, name: str) -> bool:
        """Without a flush it is not known which steps there will be one of."""
        number = name.removeprefix("step-")
        if number == name or not number.isdecimal() or not self.pipe.index < int(number) <= self.steps:
            return False
        return self.pipe.stream is not None or self._due(int(number))
