"""The Pipeline: a model, cut into stages, trained by a schedule, with the numbers of plain training.

One process runs all stages; or, launched as several (by torchrun, or by `penstock train`), each runs its own. The
script is the same, and so are the bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.app.assemble import Assembled, assemble
from penstock.app.first_loss import Compared, warn_coupled, warn_hidden
from penstock.app.gathered import gathered
from penstock.app.inputs import input_gradients
from penstock.app.measured import Measured
from penstock.app.optimize import Update
from penstock.app.settings import Wanted, require_plain_loss
from penstock.app.state import take_state, whole_state
from penstock.core.schedule import Schedule
from penstock.core.timeline import Timeline
from penstock.errors import InputError
from penstock.model import tree
from penstock.model.batch import ApartError, as_call, join, piece, require_device, rows_of, spans, uneven_spans
from penstock.model.loss import Loss, Total, read_loss, total_of
from penstock.model.seeding import random_states_kept
from penstock.model.split import PathChangedError
from penstock.model.stage import Job
from penstock.model.untouched import untouched

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Step:
    """What one step gave: the same on every rank."""

    index: int
    loss: float
    updated: bool = True
    gradient_norm: float | None = None


class Pipeline:
    """Train `model` as a pipeline. `example` is one small batch of its inputs; see the user's guide for the rest.

    `verify`: whether the split model is compared with the whole one on the example, and the first step's loss with the
    whole batch's. `recompute` is never, except-last or always. `offload` is False, or what waits in host memory:
    "activations" (the same as True), "weights" (of stages that wait; between steps they lie there too), or "all".
    `data` is "every" where
    each rank is given the same batches, "rank0" where rank 0 has them and the others pass None. `transport` and
    `timeout` (seconds that a rank may wait for another) are for several processes, and so is `timeline`: whether each
    step's times are kept. `load`, a function from a parameter's name to its values, fills a weightless model.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        example: Any,
        stages: int | None = None,
        schedule: str | Schedule = "1f1b",
        microbatches: int = 4,
        loss: LossFunction | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        cuts: Sequence[str] | None = None,
        chunks: int | None = None,
        recompute: str = "never",
        offload: bool | str = False,
        precision: str | None = None,
        clip: float | None = None,
        accumulate: int = 1,
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        seed: int = 0,
        verify: bool = True,
        data: str = "every",
        transport: str | None = None,
        timeout: float = 120.0,
        timeline: bool = True,
        load: Callable[[str], torch.Tensor] | None = None,
    ) -> None:
        require_plain_loss(loss)
        wanted = Wanted(
            model, example, stages, schedule, microbatches, optimizer, cuts, chunks, recompute, offload, precision,
            clip, accumulate, lr_scheduler, seed, verify, data, transport, timeout, timeline, load,
        )  # fmt: skip
        self.loss, self.microbatches, self.index, self.verify = loss, microbatches, 0, verify
        self.apart = False  # results of micro-batches cannot be put together
        parts: Assembled = assemble(wanted)
        self.model, self.split, self.schedule, self.stages = (
            parts.split.model,
            parts.split,
            parts.schedule,
            parts.stages,
        )
        self.crew, self.engine, self.feed, self.clock = parts.crew, parts.engine, parts.feed, parts.clock
        self.optimizers, self.norms, self.buffers = parts.optimizers, parts.norms, parts.buffers
        self.device, self.settings = parts.device, parts.settings
        self.trained = self._trained()

    def step(self, inputs: Any, target: Any = None) -> Step:
        """One synchronous step over a batch: all micro-batches forward and backward, then the update."""
        loss = self._require_loss()
        inputs, target = self.feed.one(inputs, target)
        with torch.enable_grad(), input_gradients(inputs, self.crew.alone) as scaled:
            found = self._again(lambda: self._run(self._jobs(inputs, target, self.microbatches, _scored(loss))))
            scaled.by = self.optimizers.unit / (found.weight * self.optimizers.scale)
        if self.index == 0 and self.verify:
            self._compare_loss(loss, inputs, target)
        update = self._updated(found)
        self.index += 1
        return Step(self.index - 1, found.mean, update.updated, update.norm)

    def train(self, loader: Iterable[tuple[Any, Any]] | None) -> Iterator[Step]:
        """One record a batch of the loader, which yields (inputs, target)."""
        for inputs, target in self.feed.each(loader):
            yield self.step(inputs, target)

    def evaluate(self, loader: Iterable[tuple[Any, Any]] | None) -> float:
        """The mean loss over a loader, in eval mode, without gradients."""
        loss, total, weight = self._require_loss(), 0.0, 0.0
        with _in_eval_mode(self.model), torch.no_grad():
            for batch in self.feed.each(loader):
                found = total_of(self._forward(*self.feed.one(*batch), _scored(loss)))
                total, weight = total + found.total, weight + found.weight
        total, weight = self.crew.tell([total, weight])
        if not weight:
            raise InputError("a loader with something to score", "nothing", "give data to evaluate")
        return float(total / weight)

    def forward(self, inputs: Any) -> Any:
        """The model's result for a batch, without gradients, in the mode the model is in: on every rank."""
        inputs, _ = self.feed.one(inputs, None)
        rows = rows_of(as_call(inputs))
        found, apart = self._together(inputs, [(0, rows)] if self.apart else uneven_spans(rows, self.microbatches))
        if apart:  # such a model's batches run as one from now on
            self.apart = True
            found, _ = self._together(inputs, [(0, rows)])
        return self.crew.result(found, self._example_result(inputs), self.device)

    def state_dict(self) -> dict[str, Any]:
        """The whole model's state under its own names, on every rank."""
        return whole_state(self.crew, self.split)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the whole model's state; each rank takes what its stages need."""
        take_state(self.split, state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the training state to a new directory, between two steps; every rank has to call."""
        from penstock.app import checkpoint  # not at the top: torch's part of it takes long to import

        checkpoint.save(self, path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take up the training where `path` was saved, by whatever stages; every rank has to call."""
        from penstock.app import checkpoint

        checkpoint.load(self, path)

    def measured(self) -> Measured:
        """The last steps as they were measured on all ranks; every rank has to ask."""
        return gathered(self)

    def timeline(self) -> Timeline:
        """The last step as it was measured on all ranks; every rank has to ask."""
        return self.measured().timeline()

    def close(self) -> None:
        """Let go of what joins this pipeline's processes, which the end of the process does too. By every rank."""
        self.engine.close()

    def _run(self, jobs: list[Job]) -> Total:
        """All forwards and backwards; whatever goes wrong, the model is then as it was before."""
        self.stages[-1].root = self.optimizers.root(sum(job.rows for job in jobs))
        before = self.buffers.save()
        try:
            with random_states_kept(self.device), self.norms, self.optimizers.gathering():
                found = self._agreed(self.engine.run(jobs))
                found.require_usable()
        except BaseException:
            self.engine.drop()
            self.buffers.restore(before)
            raise
        self.buffers.learn(before)
        return found

    def _updated(self, found: Total) -> Update:
        if self.clock is not None:
            self.clock.tick()
        update = self.optimizers.finish(found)
        self.norms.move()
        if self.clock is not None:
            self.clock.tick()
            self.clock.end()
        return update

    def _agreed(self, losses: list[Loss]) -> Total:
        """The loss, which the last stage knows, on every rank."""
        mine = self.crew.world.rank == self.crew.last
        found = total_of(losses) if mine else Total(0.0, 0.0)
        return Total(*self.crew.tell([found.total, found.weight]))

    def _again(self, run: Callable[[], Any]) -> Any:
        """Run something, and once more if a path has changed: it is then traced afresh, where all weights are."""
        try:
            return run()
        except PathChangedError:
            if not self.split.whole:
                raise
        return run()

    def _together(self, inputs: Any, cut: list[tuple[int, int]]) -> tuple[Any, bool]:
        """One result of several micro-batches, on the last stage's rank; or whether they cannot be put together, and
        nothing has changed."""
        before, found, apart = self.buffers.save(), None, False
        try:
            with torch.no_grad(), self.norms:
                results = self._forward(inputs, None, _unchanged, cut)
            try:
                found = join(results, [last - first for first, last in cut], sure=True) if results else None
            except ApartError:
                apart = True
            apart = self.crew.tell(apart)
        except BaseException:
            self.buffers.restore(before)
            raise
        if apart:
            self.buffers.restore(before)
        else:
            self.norms.move()
        return found, apart

    def _forward(
        self,
        inputs: Any,
        target: Any,
        finish: Callable[[Any, Any, int], Any],
        cut: list[tuple[int, int]] | None = None,
    ) -> list[Any]:
        """What becomes of each micro-batch, on the rank of the last stage; nothing on the others."""
        rows = rows_of(as_call(inputs), target)
        cut = cut or spans(rows, min(self.microbatches, rows))
        with random_states_kept(self.device):
            results: list[Any] = self._again(lambda: self.engine.forward(self._jobs(inputs, target, cut, finish)))
        return results if self.crew.world.rank == self.crew.last else []

    def _example_result(self, inputs: Any) -> Any:
        """The structure of the model's result for such inputs."""
        args, kwargs = as_call(inputs)
        with torch.no_grad():
            return self.split.path(args, kwargs).trace.result

    def _require_loss(self) -> LossFunction:
        if self.loss is None:
            raise InputError("a loss to train or evaluate", "none", "give loss= to the Pipeline")
        return self.loss

    def _jobs(
        self,
        inputs: Any,
        target: Any,
        cut: int | list[tuple[int, int]],
        finish: Callable[[Any, Any, int], Any],
        step: int | None = None,
    ) -> list[Job]:
        """One for each span of rows, or for so many micro-batches."""
        call, step = as_call(inputs), self.index if step is None else step
        self._notice_frozen()
        require_device((call, target), self.device)
        self.engine.stamp = self.feed.stamp(inputs, target)
        jobs, every = [], rows_of(call, target)
        cut = spans(every, cut) if isinstance(cut, int) else cut
        for number, (first, last) in enumerate(cut):
            args, kwargs = piece(call, first, last, every)
            path, rows, wanted = self.split.path(args, kwargs), last - first, piece(target, first, last, every)
            self.crew.require_lanes(path.edges, self.schedule.shape.edges)
            jobs.append(
                Job(number, step, args, kwargs, rows, path, _Finish(finish, wanted, rows), number == len(cut) - 1)
            )
        return jobs

    def _compare_loss(self, loss: LossFunction, inputs: Any, target: Any) -> None:
        """On the first step only, before its update: see first_loss."""
        rows, last = rows_of(as_call(inputs), target), self.crew.world.rank == self.crew.last
        # A layer that changes numbers in eval mode too, or keeps them: the user's step must find them as they were.
        with (
            untouched(self.model, self.split.first.trace.generators),
            _in_eval_mode(self.model),
            torch.no_grad(),
            self.settings.autocast(),
        ):
            parts, whole = (self._results(inputs, target, count, 0) for count in (self.microbatches, 1))
            if parts is None or whole is None:
                return
            found = Compared(loss, target, rows, parts, whole[0])
            hidden = found.hidden() if last else None
            if hidden is not None:
                warn_hidden(*hidden, self.microbatches)
            coupled = found.coupled() if last and hidden is None else None
            if self.crew.tell(coupled) is None:
                return
            again = self._results(inputs, target, 1, 1)  # with other random numbers
            if again is not None and coupled is not None and _same(again[0], whole[0]):
                warn_coupled(*coupled, self.microbatches)

    def _results(self, inputs: Any, target: Any, parts: int, step: int) -> list[Any] | None:
        """The model's results for so many micro-batches; None if they cannot be had."""
        try:
            jobs = self._jobs(inputs, target, parts, _unchanged, step)
        except Exception:  # a model that cannot be run so, without gradients: every rank finds the same
            return None
        try:
            with random_states_kept(self.device):
                return self.engine.forward(jobs)
        except Exception:
            if self.crew.alone:
                return None
            raise

    def _trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.model.parameters()]

    def _notice_frozen(self) -> None:
        """Which values need a gradient depends on which parameters do: trace again when that has changed."""
        trained = self._trained()
        if trained != self.trained:
            self.split.paths.clear()
            self.trained = trained


@dataclass(frozen=True)
class _Finish:
    """What becomes of the model's result for one micro-batch."""

    finish: Callable[[Any, Any, int], Any]
    target: Any
    rows: int

    def __call__(self, result: Any) -> Any:
        return self.finish(result, self.target, self.rows)


def _scored(loss: LossFunction) -> Callable[[Any, Any, int], Loss]:
    return lambda result, target, rows: read_loss(loss(result, target), rows)


def _unchanged(result: Any, target: Any, rows: int) -> Any:
    return result


def _same(a: Any, b: Any) -> bool:
    pairs_of = zip(tree.tensors(a), tree.tensors(b), strict=True)
    return all(torch.equal(one, other) for one, other in pairs_of)


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Each module gets its own mode back: some are kept in eval mode while the model trains."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


__all__ = ["Pipeline", "Step"]
