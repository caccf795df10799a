"""Looks at how the loss weighs: once at a whole batch, and in every batch at what may weigh.

The first batch's loss is compared with that of its micro-batches: see first_step.py. Later batches may be the first to
have ignored labels, so these are counted: see label_counts.py. Where micro-batches have unequal counts, a few rows'
loss is looked at with more of them: see additive. A loss that goes by them and does not say so is refused.
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
from penstock.training.first_step import Compared, warn_coupled, warn_hidden
from penstock.training.label_counts import LabelCounts, Uneven, variants
from penstock.training.micro_batches import Cut, Finish, both, divided_spans, kept_and_scored, scored, unchanged
from penstock.training.pipeline_parts import LossFunction, PipelineParts


class LossChecks:
    """What is looked at in the batches of one pipeline."""

    def __init__(self, pipe: PipelineParts) -> None:
        path, named = pipe.split.first, places((pipe.wanted.example, None))
        layers = frozenset(place for value, place in enumerate(named) if value in path.layer_inputs)
        self.pipe, self.counts = pipe, LabelCounts(layers)

    def first_batch(self, loss: LossFunction, inputs: Any, target: Any) -> None:
        """On the first step only, before its update: see first_step.py."""
        pipe = self.pipe
        if pipe.index or not pipe.verify:
            return
        rows, last = rows_of(as_call(inputs), target), pipe.crew.world.rank == pipe.crew.last
        with self._aside(), pipe.settings[0].autocast():
            parts = self._results(inputs, target, self._parts(rows), 0, kept_and_scored(loss))
            whole = self._results(inputs, target, 1, 0)
            if parts is None or whole is None:
                return
            found = Compared(loss, inputs, target, rows, *both(parts), whole[0]) if last else None
            hidden = found.hidden() if found is not None else None
            cut = f"{pipe.microbatches} micro-batches"
            if pipe.crew.replicas[-1] > 1:
                cut += f", each divided over {pipe.crew.replicas[-1]} replicas of the last stage"
            if hidden is not None:
                warn_hidden(*hidden, cut)
            mixes = hidden is None and not pipe.split.first.trace.draws  # else other draws make other results
            coupled = found.coupled() if found is not None and mixes else None
            if pipe.crew.tell(coupled) is None:
                return
            again = self._results(inputs, target, 1, 1)  # with other random numbers
            if again is not None and coupled is not None and _same(again[0], whole[0]):
                warn_coupled(*coupled, cut)

    def every_batch(self, loss: LossFunction, inputs: Any, target: Any, flowing: bool = False) -> list[Uneven]:
        """Refuse a batch whose loss weighs micro-batches in a way that it keeps to itself.

        While other batches are in flight, nothing can be run in between: returned is what this one's own forward is to
        be asked, see `ask`. If its micro-batches have too few rows for that, what is in flight is trained to its end.
        """
        if not self.pipe.verify or self.pipe.split.first.trace.written:
            return []  # a forward that changes its weights has another loss each time, whatever the labels
        rows, later = rows_of(as_call(inputs), target), []
        cut = self._parts(rows)
        for uneven in self.counts.uneven((inputs, target), cut):
            known = self.counts.weighs.get(uneven.suspect)
            if known is None and flowing and uneven.micro_batch(cut) is not None:
                later.append(uneven)
                continue
            if known is None and flowing and uneven.row is not None:
                continue  # any labels may be looked at so: not worth what is in flight
            if known is None:
                self.pipe.settle()
                known = self._goes_by(loss, inputs, target, rows, uneven)
                self.counts.learn(uneven.suspect, known)
            if known:
                _refuse(uneven)
        return later

    def ask(self, jobs: list[Job], inputs: Any, target: Any, every: list[Uneven]) -> None:
        """Have the last stage look at the loss when it runs these micro-batches, and refuse it there. The other ranks
        hear of a refusal, so for them no news is an answer."""
        rows = sum(job.rows for job in jobs)
        cut = spans(rows, min(len(jobs), rows))
        for uneven in every:
            number = uneven.micro_batch(cut)
            assert number is not None
            few = piece(inputs, *cut[number], rows), piece(target, *cut[number], rows)
            self.counts.learn(uneven.suspect, False)
            jobs[number].questions.append(
                Question(_others(jobs[number], variants(few, uneven) or []), uneven.row is None, self._told(uneven))
            )

    def _told(self, uneven: Uneven) -> Callable[[bool | None], None]:
        def told(weighs: bool | None) -> None:
            if weighs:
                self.counts.learn(uneven.suspect, True)
                _refuse(uneven)

        return told

    def _goes_by(self, loss: LossFunction, inputs: Any, target: Any, rows: int, uneven: Uneven) -> bool | None:
        """Whether the loss weighs rows by a value; None where that is not to be found out by this batch."""
        few = piece(inputs, *uneven.window, rows), piece(target, *uneven.window, rows)
        changed = variants(few, uneven)
        if changed is None:
            return None
        with self._aside():
            found = self._results(*few, 1, 0, scored(loss), changed, uneven.row is None)
        return self.pipe.crew.tell(None if found is None else found[0])  # type: ignore[no-any-return]

    def _parts(self, rows: int) -> list[tuple[int, int]]:
        """Return the rows of all parts of a batch that have a loss of their own."""
        cut = spans(rows, min(self.pipe.microbatches, rows))
        return [span for span in divided_spans(cut, self.pipe.crew.replicas[-1]) if span[0] < span[1]]

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A layer that changes numbers in eval mode too, or keeps them: the user's step must find them as they were."""
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
        """The model's results for so many micro-batches; None if they cannot be had. With `changed` batches, what the
        last stage finds out about the loss by them: see Question."""
        try:
            jobs = self.pipe.micro_batches.jobs(inputs, target, parts, finish, step)
        except Exception:  # a model that cannot be run so, without gradients: every rank finds the same
            return None
        if changed is not None:
            jobs[0].questions.append(Question(_others(jobs[0], changed), sure))
        try:
            with random_states_kept(self.pipe.device):
                return self.pipe.executor.forward(jobs)
        except Exception:
            if self.pipe.crew.alone:
                return None
            raise


def _others(job: Job, changed: list[Any]) -> list[Job]:
    """A micro-batch as it is, and with other labels; not cut from a batch, whose weight in all would be needed. Their
    weights are in one unit."""
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
    """Each module gets its own mode back: some are kept in eval mode while the model trains."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
