"""Whether a pipeline can go on: not after something has failed in it that left its stages, or its ranks, apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.comm.watch.report import one_line
from penstock.comm.world.world import World
from penstock.errors import InputError
from penstock.training.processes import Crew
from penstock.training.stage_optimizers import Optimizers


class Health:
    """Of one pipeline. `why` it cannot go on; "" while it can."""

    def __init__(self, crew: Crew) -> None:
        self.crew, self.why = crew, ""

    def require(self) -> None:
        """Refuse to train, evaluate or save by what is left half done."""
        if self.why:
            load = "load a checkpoint into it, or " if self.crew.alone else ""
            raise InputError("a pipeline that can go on", self.why, f"{load}make another Pipeline")

    def break_off(self, error: BaseException, moved: bool) -> None:
        """Something has failed. `moved`: some stages may have an update that others lack."""
        apart = "one of which some stages may have an update that others lack, as something has failed: "
        self.why = (apart if moved else "one in which something has failed before: ") + one_line(error)

    @contextmanager
    def of_run(self) -> Iterator[None]:
        """Around what ranks do together: when it fails, messages are left between them. One process leaves nothing."""
        try:
            yield
        except BaseException as error:
            if not self.crew.alone:
                self.break_off(error, False)
            raise

    @contextmanager
    def of_update(self, optimizers: Optimizers) -> Iterator[None]:
        """Around an update. Gradients that all ranks refuse together leave everything as it was."""
        try:
            yield
        except BaseException as error:
            together = optimizers.updating is None and (self.crew.alone or isinstance(error, InputError))
            if not together:
                self.break_off(error, optimizers.updating is not None)
                if isinstance(self.crew.world, World):
                    self.crew.world.watch.failed(error)
            raise
