"""A stage of a model: forward, full backward, or input and weight gradient separately, for many micro-batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from penstock.model.additive import goes_by_labels, gradient_of
from penstock.model.batchnorm import DeferredNorms
from penstock.model.buffers import Buffers
from penstock.model.labels import Labels
from penstock.model.loss import Loss
from penstock.model.mean_loss import Part, safe_means
from penstock.model.offload import Offload, saving, to_device, to_host
from penstock.model.own_loss import next_node, own_loss
from penstock.model.passage import Common, Passage
from penstock.model.path import Path
from penstock.model.reweigh import Reweigh
from penstock.model.seeding import mixed, seed_all
from penstock.model.split import Split
from penstock.model.split_backward import WeightQueue, deferring
from penstock.model.state import Saved, State
from penstock.model.words import Words

_NOTHING = contextlib.nullcontext()
Values = dict[int, torch.Tensor]  # by the number of the value in the path's trace


class Recompute(StrEnum):
    """The micro-batches whose forward is recomputed for the backward."""

    NEVER = "never"
    EXCEPT_LAST = "except-last"  # the last micro-batch's backward follows at once: recomputing it saves no memory
    ALWAYS = "always"


@dataclass(frozen=True)
class Settings:
    """How a stage runs. Device, seed and precision are the same for all stages of a pipeline."""

    device: torch.device
    seed: int = 0
    recompute: Recompute = Recompute.NEVER
    offload: Offload = Offload.NOTHING
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True)
class Share:
    """A replica's part of a micro-batch. `whole`: the rows of the micro-batch on all replicas of the stage together."""

    replica: int
    replicas: int
    whole: int


@dataclass
class Job:
    """One micro-batch on its way through the stages. `finish` turns the model's result into a loss, on the last
    stage."""

    number: int  # in the run, as in schedules
    step: int  # of the training
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int  # 0: a micro-batch without rows, of a mini-batch with fewer rows than micro-batches; no stage runs it
    path: Path
    finish: Callable[[Any], Any]
    last: bool = False  # of its mini-batch
    passage: Passage = field(default_factory=Passage)
    part: int = 0  # its number in its mini-batch
    stamp: int = 0  # a check number of its mini-batch
    root: float = 1.0  # initial gradient of its loss
    chance: int = 0  # seed of random numbers between the model's modules
    words: Words = field(default_factory=Words)
    mates: Sequence[Job] = ()  # the micro-batches of its mini-batch, itself included
    labels: Labels | None = None  # of its mini-batch, where it is to be scored
    share: Share | None = None  # of the micro-batch, where replicas divide it
    questions: list[Question] = field(default_factory=list)

    @property
    def labelled_part(self) -> int:
        """The number of this part among those that the mini-batch's labels are divided into."""
        return self.part if self.share is None else self.part * self.share.replicas + self.share.replica

    @property
    def batch_rows(self) -> int:
        """Rows of the mini-batch, on all replicas of a stage together."""
        return sum(mate.rows if mate.share is None else mate.share.whole for mate in self.mates)


@dataclass(frozen=True)
class Question:
    """A check whether the loss of a micro-batch depends on label counts, with copies of it that have other labels. The
    answer replaces the result of the micro-batch; or, with `told`, it is passed there and the micro-batch runs."""

    others: list[Job]
    sure: bool = True  # whether such labels are valid for the loss
    told: Callable[[bool | None], None] | None = None


@dataclass
class _Graph:
    """A stage's data of a micro-batch between its forward and its backward."""

    leaves: Values
    made: Values  # with their graph
    loss: Loss | None
    queue: WeightQueue | None


@dataclass
class _Inputs:
    """A stage's data of a micro-batch whose forward will be run again."""

    received: Values
    state: Saved  # of the stage's modules
    split_backward: bool


class Stage:
    """One stage of a split model."""

    def __init__(
        self,
        split: Split,
        index: int,
        settings: Settings,
        norms: DeferredNorms,
        buffers: Buffers,
        parameters: list[nn.Parameter],
        shared: Sequence[nn.Parameter] = (),
        replica: int = 0,
    ) -> None:
        self.split, self.index, self.settings, self.norms, self.buffers = split, index, settings, norms, buffers
        self.parameters = parameters  # that its forward uses
        self.replica = replica
        # Of parameters that other stages or replicas use too, gradients are kept apart: added stage by stage and
        # replica by replica in the end, they have the same bits whoever runs the stages.
        self.shared = list(shared)
        self.parts: dict[nn.Parameter, torch.Tensor] = {}
        self.last = index == split.pieces - 1
        self.reweigh: Reweigh | None = None  # where a backward uses other weights than its forward
        self.kept: dict[int, _Graph | _Inputs] = {}
        self.queues: dict[int, WeightQueue] = {}
        self.sure = False  # whether the loss is known to be computed from what this stage has
        self.since: int | None = None  # graph nodes created since, while that is being checked
        self.forwards = 0  # training forwards, counted for tests

    def forward(self, job: Job, received: Values, split_backward: bool = False) -> tuple[Values, Any]:
        """Run a micro-batch. Return the values that later stages need, and on the last stage the result of `finish`."""
        for question in job.questions if self.last else ():
            found = self._looked_at(question, received)
            if question.told is None:
                return {}, found
            question.told(found)
        if not torch.is_grad_enabled():
            return self._run(job, received)
        if self._runs_again(job):
            # Gradients are enabled, as in the second run: otherwise hooks could not be registered, and other kernels
            # might give other bits. The graph is freed as soon as the forward is over.
            self.kept[job.number] = _Inputs(self._parked(received), self._state(job).save(), split_backward)
            _, made, result = self._record(job, received, split_backward=False)
        else:
            with self._saving(job):
                self.kept[job.number], made, result = self._record(job, received, split_backward)
        return {value: tensor.detach() for value, tensor in made.items()}, _detached(result)

    def backward(self, job: Job, gradients: Values) -> Values:
        """Run the full backward, or the input gradient alone where the forward was split. Return the gradients to be
        sent back."""
        kept = self.kept.pop(job.number)
        graph = self._record_again(job, kept) if isinstance(kept, _Inputs) else kept
        roots = [(tensor, gradients[value]) for value, tensor in graph.made.items() if value in gradients]
        if graph.loss is not None:
            loss = graph.loss
            roots.append((loss.value, torch.full_like(loss.value, job.root * loss.times)))
        if graph.queue is not None:
            self.queues[job.number] = graph.queue
        if roots:
            safe = safe_means() if graph.loss is not None else _NOTHING
            with deferring(graph.queue) if graph.queue is not None else _NOTHING, self._own_parts(), safe:
                _run_backward(tuple(root for root, _ in roots), tuple(gradient for _, gradient in roots))
        return {value: leaf.grad for value, leaf in graph.leaves.items() if leaf.grad is not None}

    def weight_gradient(self, job: Job) -> None:
        """Compute the weight gradients that the input gradient has deferred."""
        with self._own_parts():
            self.queues.pop(job.number).run()

    def drop(self) -> None:
        """Discard the data of an interrupted step."""
        self.kept.clear()
        self.queues.clear()
        self.parts.clear()

    def _own_parts(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which `.grad` of shared parameters is this stage's own part."""
        return self._parting() if self.shared else _NOTHING

    @contextlib.contextmanager
    def _parting(self) -> Iterator[None]:
        before = {parameter: parameter.grad for parameter in self.shared}
        for parameter in self.shared:
            parameter.grad = self.parts.pop(parameter, None)
        try:
            yield
        finally:
            for parameter, gradient in before.items():
                if parameter.grad is not None:
                    self.parts[parameter] = parameter.grad
                parameter.grad = gradient

    def _runs_again(self, job: Job) -> bool:
        recompute = self.settings.recompute
        return recompute is Recompute.ALWAYS or (recompute is Recompute.EXCEPT_LAST and not job.last)

    def _record(self, job: Job, received: Values, split_backward: bool) -> tuple[_Graph, Values, Any]:
        """Run with a graph, from leaves that collect the gradients to be sent back."""
        self.forwards += 1
        known, told = job.path.trace.values, job.passage.grads
        leaves = {
            v: t.detach().requires_grad_(told.get(v, known[v].grad) and (t.is_floating_point() or t.is_complex()))
            for v, t in received.items()
        }
        queue = WeightQueue() if split_backward else None
        self.since = next_node() if self.last and not self.sure else None
        made, result = self._run(job, leaves, queue)
        for value, tensor in made.items():
            if tensor.requires_grad != known[value].grad:  # changed by a user's flag since the trace
                told[value] = tensor.requires_grad
        history = {value: tensor for value, tensor in made.items() if tensor.requires_grad}
        return _Graph(leaves, history, result if isinstance(result, Loss) else None, queue), made, result

    def _looked_at(self, question: Question, received: Values) -> bool | None:
        """Return whether the loss depends on label counts (see additive); None where it cannot be computed for other
        labels."""
        state = self._state(question.others[0])
        try:
            every = []
            with self.norms.looking_away():
                for other in question.others:
                    with state.as_they_were(state.save()):  # layers may keep state from one run to the next
                        loss = functools.partial(self._loss, other)
                        every.append(gradient_of(loss, received, self.parameters))
        except Exception:
            return None
        return goes_by_labels(every, question.sure)

    def _loss(self, job: Job, received: Values) -> Any:
        """Return the loss for other labels, without results that stages share for the original ones."""
        job = replace(job, passage=replace(job.passage, common=Common(), fixed=Common()))
        return self._run(job, received)[1]

    def _finished(self, job: Job, result: Any) -> Any:
        since, self.since = self.since, None
        if since is None:
            return job.finish(result)
        given = (job.args, job.kwargs, getattr(job.finish, "target", None))
        found = own_loss(lambda: job.finish(result), since, given, self.split.kept_by_others(job.path, self.index))
        self.sure = True
        return found

    def _record_again(self, job: Job, kept: _Inputs) -> _Graph:
        """Run a forward again: norms do not count it, and modules have the state of the first run."""
        received = {value: to_device(tensor, self.settings.device) for value, tensor in kept.received.items()}
        with self.norms.looking_away(), self._state(job).as_they_were(kept.state), self._saving(job):
            return self._record(job, received, kept.split_backward)[0]

    def _run(self, job: Job, values: Values, queue: WeightQueue | None = None) -> tuple[Values, Any]:
        changed = job.path.changed[self.index]
        fed = {v: t.clone() if v in changed else t for v, t in values.items()} if changed else values
        if job.step >= 0:  # else with random numbers as they come
            place = (self.index, job.part, self.replica) if self.replica else (self.index, job.part)
            seed_all(mixed(self.settings.seed, job.step, *place), self.settings.device)
        defer = contextlib.nullcontext if queue is None else functools.partial(deferring, queue)
        with self.settings.autocast(), self.norms.forward(self.index, job.step, self.replica), self._scoring(job):
            made, result = self.split.run(
                job.path, self.index, fed, job.passage, job.args, job.kwargs, defer, job.chance
            )
            return made, self._finished(job, result) if self.last else None

    def _scoring(self, job: Job) -> contextlib.AbstractContextManager[Any]:
        return _NOTHING if job.labels is None else Part(job.labels, job.labelled_part, self.index, self.last)

    def _saving(self, job: Job) -> contextlib.AbstractContextManager[Any]:
        if self.reweigh is not None:
            return self.reweigh.saving(job.path)
        if not self.settings.offload:
            return _NOTHING
        return saving(self.settings.offload, self.parameters)

    def _parked(self, received: Values) -> Values:
        if Offload.ACTIVATIONS not in self.settings.offload:
            return received
        return {value: to_host(tensor) for value, tensor in received.items()}

    def _state(self, job: Job) -> State:
        """Return the state of the modules that this stage runs."""
        known = job.path.states.get(self.index)
        if known is None:
            modules = self.split.modules(job.path, self.index)
            known = job.path.states[self.index] = self.buffers.within(modules, job.path.trace.generators)
        return known


def _run_backward(roots: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]) -> None:
    """Call autograd's engine directly, without the checks of `torch.autograd.backward`, which take as long as a small
    stage. In unusual cases, call torch's."""
    if all(type(g) is torch.Tensor and g.shape == r.shape and g.dtype is r.dtype for r, g in zip(roots, gradients)):  # noqa: B905
        torch.autograd.Variable._execution_engine.run_backward(
            roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:
        torch.autograd.backward(roots, gradients)


def _detached(result: Any) -> Any:
    return Loss(result.value.detach(), result.weight, result.times) if isinstance(result, Loss) else result
