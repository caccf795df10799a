"""Whether a pipeline can go on: not after a failure that left its stages or ranks in different states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.comm.watch.report import one_line
from penstock.comm.world.world import World
from penstock.errors import InputError
from penstock.training.processes import Ranks
from penstock.training.stage_optimizers import Optimizers


class Health:
    """State of one pipeline: `why` it cannot go on, "" while it can."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.why = ranks, ""

    def require(self) -> None:
        """Raise if the pipeline cannot train, evaluate or save any more."""
        if self.why:
            load = "load a checkpoint into it, or " if self.ranks.alone else ""
            raise InputError("a pipeline that can go on", self.why, f"{load}make another Pipeline")

    def break_off(self, error: BaseException, moved: bool) -> None:
        """Note a failure. `moved`: some stages may have an update that others lack."""
        apart = "one of which some stages may have an update that others lack, as something has failed: "
        self.why = (apart if moved else "one in which something has failed before: ") + one_line(error)

    @contextmanager
    def of_run(self) -> Iterator[None]:
        """Run rows inside. A failure leaves messages between ranks, so several of them cannot go on."""
        try:
            yield
        except BaseException as error:
            if not self.ranks.alone:
                self.break_off(error, False)
            raise

    @contextmanager
    def of_update(self, optimizers: Optimizers) -> Iterator[None]:
        """Run an update inside. Gradients that all ranks refuse together leave everything as it was."""
        try:
            yield
        except BaseException as error:
            together = optimizers.updating is None and (self.ranks.alone or isinstance(error, InputError))
            if not together:
                self.break_off(error, optimizers.updating is not None)
                if isinstance(self.ranks.world, World):
                    self.ranks.world.watch.failed(error)
            raise
