"""Forwards without a backward: for an evaluation, and for the model's result."""

from __future__ import annotations

from typing import Any

import torch

from penstock.model.batch import ApartError, as_call, join, piece, rows_of, spans, uneven_spans
from penstock.model.seeding import mixed, random_states_kept
from penstock.model.stage import Job
from penstock.training.micro_batches import Finish, unchanged
from penstock.training.pipeline_parts import PipelineParts


class Forwards:
    """Those of one pipeline."""

    def __init__(self, pipe: PipelineParts) -> None:
        self.pipe = pipe
        self.apart = False  # results of micro-batches cannot be put together

    def result(self, inputs: Any) -> Any:
        """The model's result for a batch, on every rank."""
        rows = rows_of(as_call(inputs))
        cut = [(0, rows)] if self.apart else uneven_spans(rows, self.pipe.microbatches)
        found, apart = self._together(inputs, cut)
        if apart:  # such a model's batches run as one from now on
            self.apart, cut = True, [(0, rows)]
            found, _ = self._together(inputs, cut)
        return self.pipe.crew.result(found, self._example(inputs, *cut[0]), self.pipe.device)

    def _together(self, inputs: Any, cut: list[tuple[int, int]]) -> tuple[Any, bool]:
        """One result of several micro-batches, on the last stage's rank; or whether they cannot be put together, and
        nothing has changed."""
        before, found, apart = self.pipe.buffers.save(), None, False
        self.pipe.norms.forget()
        try:
            with torch.no_grad(), self.pipe.norms:
                results = self.each(inputs, None, unchanged, cut)
            try:
                found = join(results, [last - first for first, last in cut], sure=True) if results else None
            except ApartError:
                apart = True
            apart = self.pipe.crew.tell(apart)
        except BaseException:
            self.pipe.buffers.restore(before)
            raise
        if apart:
            self.pipe.buffers.restore(before)
        else:
            self.pipe.norms.move()
        return found, apart

    def each(
        self,
        inputs: Any,
        target: Any,
        finish: Finish,
        cut: list[tuple[int, int]] | None = None,
    ) -> list[Any]:
        """What becomes of each micro-batch, on the rank of the last stage; nothing on the others."""
        rows = rows_of(as_call(inputs), target)
        cut = cut or spans(rows, min(self.pipe.microbatches, rows))
        with random_states_kept(self.pipe.device):
            results: list[Any] = self.pipe.again(lambda: self._through(self.pipe.jobs(inputs, target, cut, finish)))
        return results if self.pipe.crew.world.rank == self.pipe.crew.last else []

    def _through(self, jobs: list[Job]) -> list[Any]:
        with self.pipe.health.of_run():
            return self.pipe.executor.forward(jobs)

    def _example(self, inputs: Any, first: int, last: int) -> Any:
        """The structure of the model's result for such inputs, as their first micro-batch has it."""
        args, kwargs = piece(as_call(inputs), first, last)
        with torch.no_grad():
            return self.pipe.split.path(
                args, kwargs, chance=mixed(self.pipe.options.seed, self.pipe.index, 0)
            ).trace.result
