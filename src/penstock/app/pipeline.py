"""The Pipeline: a model, cut into stages, trained by a schedule, with the numbers of plain training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.app.hidden_weights import Batch, warn_if_hidden
from penstock.app.optimize import Optimizers
from penstock.app.settings import home_of, read_precision, read_recompute, read_schedule, with_edges
from penstock.app.verify import compare_with_whole
from penstock.core.check import prove
from penstock.core.schedule import Schedule
from penstock.engine.inline import InlineEngine
from penstock.errors import InputError
from penstock.model.batch import as_call, join, piece, require_device, rows_of, spans
from penstock.model.batchnorm import DeferredNorms
from penstock.model.buffers import Buffers
from penstock.model.chain import Chain
from penstock.model.loss import Loss, Total, read_loss, total_of
from penstock.model.materialise import is_weightless
from penstock.model.offload import Offload, Swap
from penstock.model.seeding import random_states_kept
from penstock.model.split import Split
from penstock.model.stage import Job, Settings, Stage

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

    `recompute` is never, except-last or always. `offload` is False, or what waits in host memory: "activations" (the
    same as True), "weights" (of stages that wait; between steps they lie there too), or "all".
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
    ) -> None:
        if not isinstance(model, nn.Module):
            model = Chain(list(model))
            stages, cuts = len(model.stages), [f"stages.{i}" for i in range(1, len(model.stages))]
        if loss is not None and not callable(loss):
            raise InputError("loss= to be a function", type(loss).__name__, "give loss=lambda result, target: ...")
        if is_weightless(model):
            advice = "give it weights first: materialise(model, [name for name, _ in model.named_parameters()])"
            raise InputError("a model with weights, as one process runs all stages", "a weightless one", advice)
        self.model, self.loss, self.microbatches, self.index = model, loss, microbatches, 0
        self.device = home_of(model)
        args, kwargs = as_call(example)
        require_device(example, self.device)
        moves = Offload.read(offload)
        settings = Settings(self.device, seed, read_recompute(recompute), moves, read_precision(precision, self.device))
        built = read_schedule(schedule, stages, microbatches, chunks, cuts)
        self.split = Split(model, built.shape.stages, args, kwargs, None if cuts is None else list(cuts))
        self.schedule = with_edges(schedule, built, self.split.edges, chunks)
        self.norms, self.buffers = DeferredNorms(model), Buffers(model)
        used = _used(self.split)
        self.stages = [
            Stage(self.split, index, settings, self.norms, self.buffers, parameters)
            for index, parameters in enumerate(used)
        ]
        proven = prove(self.schedule)
        if verify:
            compare_with_whole(self.split, args, kwargs)
        owned = [self.split.parameters(stage) for stage in range(self.split.pieces)]
        self.optimizers = Optimizers(owned, optimizer, lr_scheduler, clip, accumulate, precision == "fp16")
        self.trained = [parameter.requires_grad for parameter in self.optimizers.parameters]
        # Last, when nothing is left to refuse: from here on weights may move.
        swap = Swap(used if Offload.WEIGHTS in moves else [[] for _ in used], self.device)
        self.split.tracing, self.optimizers.turn = swap.whole, swap.turn
        self.engine = InlineEngine(proven, self.stages, swap.turn)

    def step(self, inputs: Any, target: Any = None) -> Step:
        """One synchronous step over a batch: all micro-batches forward and backward, then the update."""
        loss = self._require_loss()
        with torch.enable_grad():
            jobs = self._jobs(inputs, target, self.microbatches, _scored(loss))
            found = self._run(jobs)
        if self.index == 0:
            self._compare_loss(loss, inputs, target, found.mean)
        update = self.optimizers.finish(found)
        self.norms.move()
        self.index += 1
        return Step(self.index - 1, found.mean, update.updated, update.norm)

    def train(self, loader: Iterable[tuple[Any, Any]]) -> Iterator[Step]:
        """One record a batch of the loader, which yields (inputs, target)."""
        for inputs, target in loader:
            yield self.step(inputs, target)

    def evaluate(self, loader: Iterable[tuple[Any, Any]]) -> float:
        """The mean loss over a loader, in eval mode, without gradients."""
        loss, total, weight = self._require_loss(), 0.0, 0.0
        with _in_eval_mode(self.model), torch.no_grad():
            for inputs, target in loader:
                found = total_of(self._forward(inputs, target, _scored(loss)))
                total, weight = total + found.total, weight + found.weight
        if not weight:
            raise InputError("a loader with something to score", "nothing", "give data to evaluate")
        return total / weight

    def forward(self, inputs: Any) -> Any:
        """The model's result for a batch, without gradients, in the mode the model is in."""
        rows = rows_of(as_call(inputs))
        with torch.no_grad():
            results = self._forward(inputs, None, _unchanged)
        return join(results, [last - first for first, last in spans(rows, len(results))])

    def state_dict(self) -> dict[str, Any]:
        """The whole model's state under its own names."""
        return dict(self.model.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)

    def _run(self, jobs: list[Job]) -> Total:
        """All forwards and backwards; whatever goes wrong, the model is then as it was before."""
        self.stages[-1].root = self.optimizers.root(sum(job.rows for job in jobs))
        before = self.buffers.save()
        try:
            with random_states_kept(self.device), self.norms, self.optimizers.gathering():
                found = total_of(self.engine.run(jobs))
                found.require_usable()
        except BaseException:
            self.engine.drop()
            self.buffers.restore(before)
            raise
        self.buffers.learn(before)
        return found

    def _forward(self, inputs: Any, target: Any, finish: Callable[[Any, Any, int], Any]) -> list[Any]:
        parts = min(self.microbatches, rows_of(as_call(inputs), target))
        with random_states_kept(self.device):
            return self.engine.forward(self._jobs(inputs, target, parts, finish))

    def _require_loss(self) -> LossFunction:
        if self.loss is None:
            raise InputError("a loss to train or evaluate", "none", "give loss= to the Pipeline")
        return self.loss

    def _jobs(
        self, inputs: Any, target: Any, parts: int, finish: Callable[[Any, Any, int], Any], step: int | None = None
    ) -> list[Job]:
        call, step = as_call(inputs), self.index if step is None else step
        self._notice_frozen()
        require_device(call, self.device)
        jobs = []
        for number, (first, last) in enumerate(spans(rows_of(call, target), parts)):
            args, kwargs = piece(call, first, last)
            path, rows, wanted = self.split.path(args, kwargs), last - first, piece(target, first, last)
            done = _Finish(finish, wanted, rows)
            jobs.append(Job(number, step, args, kwargs, rows, path, done, number == parts - 1))
        return jobs

    def _compare_loss(self, loss: LossFunction, inputs: Any, target: Any, mean: float) -> None:
        """Only the first step does: see hidden_weights."""
        rows = rows_of(as_call(inputs), target)

        def whole(step: int) -> Any:
            with random_states_kept(self.device):
                return self.engine.forward(self._jobs(inputs, target, 1, _unchanged, step))[0]

        before = self.buffers.save()
        try:
            with torch.no_grad(), DeferredNorms(self.model) as norms, self.stages[0].settings.autocast():
                warn_if_hidden(loss, whole, target, Batch(rows, self.microbatches, mean, coupled=bool(norms.held)))
        finally:
            self.buffers.restore(before)

    def _notice_frozen(self) -> None:
        """Which values need a gradient depends on which parameters do: trace again when that has changed."""
        trained = [parameter.requires_grad for parameter in self.optimizers.parameters]
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


def _used(split: Split) -> list[list[nn.Parameter]]:
    """The parameters of each stage's forward: a tied one on every stage that uses it, an unused one on its owner's."""
    named = dict(split.model.named_parameters(remove_duplicate=False))
    used: list[dict[int, nn.Parameter]] = [
        {id(p): p for p in split.parameters(stage).values()} for stage in range(split.pieces)
    ]
    for name, events in split.first.trace.parameters().items():
        for stage in range(split.pieces):
            first, last = split.first.span(stage)
            if any(first <= event < last for event in events):
                used[stage][id(named[name])] = named[name]
    return [list(stage.values()) for stage in used]


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
