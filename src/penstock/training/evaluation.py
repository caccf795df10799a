"""Forwards without a backward, for an evaluation and for the model's result."""

from __future__ import annotations

from typing import Any

import torch

from penstock.model.batch import ApartError, as_call, join, piece, rows_of, spans, uneven_spans
from penstock.model.seeding import mixed, random_states_kept
from penstock.model.stage import Job
from penstock.training.micro_batches import Finish, unchanged
from penstock.training.pipeline_parts import PipelineParts


class Forwards:
    """Runs a pipeline's forwards alone."""

    def __init__(self, pipe: PipelineParts) -> None:
        self.pipe = pipe
        self.apart = False  # whether results of micro-batches cannot be joined

    def result(self, inputs: Any) -> Any:
        """Return the model's result for a batch on every rank."""
        rows = rows_of(as_call(inputs))
        cut = [(0, rows)] if self.apart else uneven_spans(rows, self.pipe.microbatches)
        result, apart = self._together(inputs, cut)
        if apart:  # such a model's batches are not cut from now on
            self.apart, cut = True, [(0, rows)]
            result, _ = self._together(inputs, cut)
        return self.pipe.ranks.broadcast_result(result, self._example(inputs, *cut[0]), self.pipe.device)

    def _together(self, inputs: Any, cut: list[tuple[int, int]]) -> tuple[Any, bool]:
        """Return the joined result of micro-batches, on the last stage's rank, and whether they cannot be joined.

        In that case nothing has changed.
        """
        before, joined, apart = self.pipe.buffers.save(), None, False
        self.pipe.norms.forget()
        try:
            with torch.no_grad(), self.pipe.norms:
                results = self.each(inputs, None, unchanged, cut)
            try:
                joined = join(results, [last - first for first, last in cut], sure=True) if results else None
            except ApartError:
                apart = True
            apart = self.pipe.ranks.broadcast(apart)
        except BaseException:
            self.pipe.buffers.restore(before)
            raise
        if apart:
            self.pipe.buffers.restore(before)
        else:
            self.pipe.norms.move()
        return joined, apart

    def each(
        self,
        inputs: Any,
        target: Any,
        finish: Finish,
        cut: list[tuple[int, int]] | None = None,
    ) -> list[Any]:
        """Return the finished result of each micro-batch on the last stage's rank, an empty list on the others."""
        rows = rows_of(as_call(inputs), target)
        cut = cut or spans(rows, min(self.pipe.microbatches, rows))
        with random_states_kept(self.pipe.device):
            results: list[Any] = self.pipe.again(lambda: self._through(self.pipe.jobs(inputs, target, cut, finish)))
        return results if self.pipe.ranks.world.rank == self.pipe.ranks.last else []

    def _through(self, jobs: list[Job]) -> list[Any]:
        with self.pipe.health.of_run():
            return self.pipe.executor.forward(jobs)

    def _example(self, inputs: Any, first: int, last: int) -> Any:
        """Return an object with the structure of the model's result, from the first micro-batch's trace."""
        args, kwargs = piece(as_call(inputs), first, last)
        with torch.no_grad():
            return self.pipe.split.path(
                args, kwargs, chance=mixed(self.pipe.options.seed, self.pipe.index, 0)
            ).trace.result
