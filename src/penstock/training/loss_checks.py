"""Checks of how the loss weighs its rows: once on a whole batch, and in every batch on values that may weigh.

The first batch's loss is compared with that of its micro-batches (loss_comparison.py). Later batches may be the first
to have ignored labels, so these are counted (label_counts.py). Where micro-batches have unequal counts, the loss of a
few rows is computed with more of them. A loss that weighs by them without returning its weight is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError
from penstock.model import tree
from penstock.model.batch import as_call, piece, rows_of, spans
from penstock.model.labels import Labels, Memory
from penstock.model.mean_loss import weight_of
from penstock.model.naming import places
from penstock.model.seeding import random_states_kept
from penstock.model.stage import Job, Question
from penstock.model.untouched import untouched
from penstock.training.label_counts import LabelCounts, Uneven, variants
from penstock.training.loss_comparison import LossComparison, warn_coupled, warn_hidden
from penstock.training.micro_batches import Cut, Finish, both, divided_spans, kept_and_scored, scored, unchanged
from penstock.training.options import LossFunction
from penstock.training.pipeline_parts import PipelineParts


class LossChecks:
    """Checks of the batches of one pipeline."""

    def __init__(self, pipe: PipelineParts) -> None:
        path, named = pipe.split.first, places((pipe.options.example, None))
        layers = frozenset(place for value, place in enumerate(named) if value in path.layer_inputs)
        self.pipe, self.counts = pipe, LabelCounts(layers)

    def first_batch(self, loss: LossFunction, inputs: Any, target: Any) -> None:
        """Compare the loss on the first step, before its update; do nothing on later ones."""
        pipe = self.pipe
        if pipe.index or not pipe.verify:
            return
        rows, last = rows_of(as_call(inputs), target), pipe.ranks.world.rank == pipe.ranks.last
        with self._aside(), pipe.settings[0].autocast():
            parts = self._results(inputs, target, self._parts(rows), 0, kept_and_scored(loss))
            whole = self._results(inputs, target, 1, 0)
            if parts is None or whole is None:
                return
            compared = LossComparison(loss, inputs, target, rows, *both(parts), whole[0]) if last else None
            hidden = compared.hidden() if compared is not None else None
            cut = f"{pipe.microbatches} micro-batches"
            if pipe.ranks.replicas[-1] > 1:
                cut += f", each divided over {pipe.ranks.replicas[-1]} replicas of the last stage"
            if hidden is not None:
                warn_hidden(*hidden, cut)
            mixes = hidden is None and not pipe.split.first.trace.draws  # else other draws make other results
            coupled = compared.coupled() if compared is not None and mixes else None
            if pipe.ranks.broadcast(coupled) is None:
                return
            again = self._results(inputs, target, 1, 1)  # with other random numbers
            if again is not None and coupled is not None and _same(again[0], whole[0]):
                warn_coupled(*coupled, cut)

    def every_batch(self, loss: LossFunction, inputs: Any, target: Any, flowing: bool = False) -> list[Uneven]:
        """Raise for a batch whose loss weighs micro-batches without returning the weight.

        While other batches are in flight (`flowing`) nothing can run in between: the questions for this batch's own
        forward are returned, see `ask`. If its micro-batches have too few rows for that, the pipeline is drained first.
        """
        if not self.pipe.verify or self.pipe.split.first.trace.written:
            return []  # a forward that changes its weights has another loss each time, whatever the labels
        rows, later = rows_of(as_call(inputs), target), []
        cut = self._parts(rows)
        for uneven in self.counts.uneven((inputs, target), cut):
            weighs = self.counts.weighs.get(uneven.suspect)
            if weighs is None and flowing and uneven.micro_batch(cut) is not None:
                later.append(uneven)
                continue
            if weighs is None and flowing and uneven.row is not None:
                continue  # any labels may raise this question: it is not worth a drain
            if weighs is None:
                self.pipe.settle()
                weighs = self._goes_by(loss, inputs, target, rows, uneven)
                self.counts.learn(uneven.suspect, weighs)
            if weighs:
                _refuse(uneven)
        return later

    def ask(self, job_of: Callable[[int, int], Job | None], inputs: Any, target: Any, every: list[Uneven]) -> None:
        """Have the last stage check the loss when it runs the micro-batches of a batch, and raise there.

        Other ranks assume that the loss passes: a failure reaches them anyway. `job_of` returns the job of a
        micro-batch on a replica of the last stage, where this process has it.
        """
        rows = rows_of(as_call(inputs), target)
        every_part, parts = self._all_parts(rows), self._parts(rows)
        for uneven in every:
            number = uneven.micro_batch(parts)
            assert number is not None
            few = piece(inputs, *parts[number], rows), piece(target, *parts[number], rows)
            self.counts.learn(uneven.suspect, False)
            job = job_of(*divmod(every_part.index(parts[number]), self._divided))
            if job is not None:
                others = _others(job, variants(few, uneven) or [])
                job.questions.append(Question(others, uneven.sure, self._answered(uneven)))

    def _answered(self, uneven: Uneven) -> Callable[[bool | None], None]:
        def answered(weighs: bool | None) -> None:
            if weighs:
                self.counts.learn(uneven.suspect, True)
                _refuse(uneven)

        return answered

    def _goes_by(self, loss: LossFunction, inputs: Any, target: Any, rows: int, uneven: Uneven) -> bool | None:
        """Return whether the loss weighs rows by a value, or None where this batch cannot show it."""
        few = piece(inputs, *uneven.window, rows), piece(target, *uneven.window, rows)
        changed = variants(few, uneven)
        if changed is None:
            return None
        with self._aside():
            results = self._results(*few, 1, 0, scored(loss), changed, uneven.sure)
        return self.pipe.ranks.broadcast(None if results is None else results[0])  # type: ignore[no-any-return]

    def _parts(self, rows: int) -> list[tuple[int, int]]:
        """Return the rows of all parts of a batch that have a loss of their own."""
        return [span for span in self._all_parts(rows) if span[0] < span[1]]

    def _all_parts(self, rows: int) -> list[tuple[int, int]]:
        """Return the rows of every micro-batch's part on each replica of the last stage; some may be empty."""
        return divided_spans(spans(rows, min(self.pipe.microbatches, rows)), self._divided)

    @property
    def _divided(self) -> int:
        """The number of parts of each micro-batch: one where replicas take whole mini-batches in turns."""
        return 1 if self.pipe.schedule.shape.turns else self.pipe.ranks.replicas[-1]

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Run in eval mode without gradients; values that layers change or keep are restored for the user's step."""
        split = self.pipe.split
        before = untouched(self.pipe.model, split.first.trace.generators, split.first.trace.written)
        with before, in_eval_mode(self.pipe.model), torch.no_grad():
            yield

    def _results(
        self,
        inputs: Any,
        target: Any,
        parts: Cut,
        step: int,
        finish: Finish = unchanged,
        changed: list[Any] | None = None,
        sure: bool = True,
    ) -> list[Any] | None:
        """Return the model's results for so many micro-batches, or None if it cannot run so. With `changed` batches,
        return the last stage's answer about the loss: see Question."""
        try:
            jobs = self.pipe.micro_batches.jobs(inputs, target, parts, finish, step)
        except Exception:  # a model that cannot run without gradients: the same on every rank
            return None
        if changed is not None:
            jobs[0].questions.append(Question(_others(jobs[0], changed), sure))
        try:
            with random_states_kept(self.pipe.device):
                return self.pipe.executor.forward(jobs)
        except Exception:
            if self.pipe.ranks.alone:
                return None
            raise


def _others(job: Job, changed: list[Any]) -> list[Job]:
    """Return jobs of a micro-batch with other labels, whose weights are in one unit.

    They are not cut from a batch, as the weight of the whole batch would then be needed.
    """
    memory = Memory()
    return [
        replace(
            job,
            part=0,
            args=as_call(inputs)[0],
            kwargs=as_call(inputs)[1],
            finish=job.finish.of(target),  # type: ignore[attr-defined]
            labels=Labels((inputs, target), [(0, job.rows)], memory, weight_of, fixed=True),
            questions=[],
            share=None,
        )
        for inputs, target in changed
    ]


def _refuse(uneven: Uneven) -> None:
    counts = f"{', '.join(map(str, uneven.counts[:8]))}{' ...' if len(uneven.counts) > 8 else ''}"
    by = f"{uneven.suspect}, {f'of which micro-batches have {counts}' if uneven.counts else 'which differ'}"
    advice = (
        "return (sum, weight) from the loss, or use torch's own cross_entropy with ignore_index; where it is computed "
        "inside the model, leave the labels out and take it outside"
    )
    compares = "; one that compares rows by their labels sees those of one micro-batch alone: give microbatches=1"
    raise InputError(
        "a loss that is a mean over rows, or (sum, weight)",
        f"one that weighs rows by {by}",
        advice if uneven.counts else advice + compares,
    )


def _same(a: Any, b: Any) -> bool:
    pairs_of = zip(tree.tensors(a), tree.tensors(b), strict=True)
    return all(torch.equal(one, other) for one, other in pairs_of)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode; each module's own mode is restored, as some stay in eval mode in training."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
