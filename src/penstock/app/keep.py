"""Checkpoints of a run from a config: every so many steps, and at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
    saved: int = -1

    def after(self, done: int) -> None:
        if self.path is None or not (done == self.steps or (self.every and done % self.every == 0)):
            return
        self.pipe.settle()
        if self.saved != self.pipe.index:
            self.saved = self.pipe.index
            self.pipe.save(str(Path(self.path) / f"step-{self.saved}"))
