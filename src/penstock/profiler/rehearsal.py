"""Every layer of a model once through forward, input gradient and weight gradient, as the engine runs them, counted.

The weights are fake, so nothing is computed and nothing is kept; what the graph would keep is added up on the way. Of
layers that the trace shows to be the same, operator by operator, only the first is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from penstock.core.profile import Sent
from penstock.model.batchnorm import DeferredNorms
from penstock.model.buffers import Buffers
from penstock.model.heap import Heap, bytes_of
from penstock.model.layers import Layers
from penstock.model.passage import Passage
from penstock.model.replay import Replay
from penstock.model.stage import Job, Settings, Stage, Values
from penstock.model.walk import watching
from penstock.profiler.counting import Counting, Work


class LayerWork(NamedTuple):
    """What one layer does for one micro-batch, and the bytes that its graph keeps: until its input gradient, and from
    there to its weights'."""

    forward: Work
    input_grad: Work
    weight_grad: Work
    kept: int
    kept_until_weight: int


@dataclass(frozen=True)
class Rehearsed:
    """The work of every layer, in order, and the tensors that they send each other."""

    work: tuple[LayerWork, ...]
    sent: tuple[Sent, ...]


def rehearse(layers: Layers, job: Job, settings: Settings) -> Rehearsed:
    """`job` is the micro-batch, on the layers' own path."""
    norms = DeferredNorms(layers.split.model)
    with watching(), norms, torch.enable_grad():
        stages = _Stages(layers, job, settings, norms)
        work = tuple(stages.run())
    made = sorted({value for values in stages.path.incoming for value in values})
    sizes = [bytes_of([stages.values[value]]) for value in made]
    sent = [Sent(one.source, one.readers, size) for one, size in zip(layers.sent, sizes, strict=True)]
    return Rehearsed(work, tuple(sent))


class _Stages:
    """One stage a layer."""

    def __init__(self, layers: Layers, job: Job, settings: Settings, norms: DeferredNorms) -> None:
        self.layers, self.job, self.settings, self.norms = layers, job, settings, norms
        self.split, self.path = layers.split, job.path
        self.buffers = Buffers(self.split.model)
        self.values: Values = {}

    def run(self) -> Iterator[LayerWork]:
        known: dict[Any, tuple[LayerWork, list[torch.Tensor]]] = {}
        for at in range(len(self.layers)):
            key, outgoing = self._marks(at), sorted(self.path.outgoing[at])
            if key not in known:
                work, made = self._layer(at)
                known[key] = work, [made[value] for value in outgoing]
            work, outputs = known[key]
            self.values.update(zip(outgoing, map(torch.empty_like, outputs), strict=True))
            yield work

    def _marks(self, at: int) -> Any:
        """The same for layers that do the same with the same."""
        seen, (first, last) = self.path.trace, self.layers[at].span
        given = [(seen.values[value].shape, seen.values[value].grad) for value in sorted(self.path.incoming[at])]
        made = [seen.values[value].shape for value in sorted(self.path.outgoing[at])]
        marks = tuple(event.mark for event in seen.events[first:last])
        return marks, tuple(given), tuple(made), at == len(self.layers) - 1

    def _layer(self, at: int) -> tuple[LayerWork, Values]:
        model = self.split.model
        stage = Stage(self.split, at, self.settings, self.norms, self.buffers, [])
        stage.sure = True  # that the loss is the stage's own: nothing is trained here
        received = {value: self.values[value] for value in self.path.incoming[at]}
        forward, heap = Counting(), Heap((*model.parameters(), *model.buffers()))
        for tensor in received.values():
            heap.add(tensor)
        with forward, heap.saving():
            made, _ = stage.forward(self.job, received)
        input_grad, weight_grad, until = self._backward(stage, received)
        own = forward.work - self._again(self.layers[at].span[0])
        return LayerWork(own, input_grad, weight_grad, heap.bytes, until), made

    def _backward(self, stage: Stage, received: Values) -> tuple[Work, Work, int]:
        """The two gradients apart, and what is held in between."""
        made, _ = stage.forward(self.job, received, split_backward=True)
        gradients = {value: torch.empty_like(tensor) for value, tensor in made.items() if tensor.is_floating_point()}
        input_grad, weight_grad = Counting(), Counting()
        with self._earlier_gradients(stage.index):
            with input_grad:
                stage.backward(self.job, gradients)
            until = stage.queues[self.job.number].held_bytes
            with weight_grad:
                stage.weight_gradient(self.job)
        return input_grad.work, weight_grad.work, until

    @contextmanager
    def _earlier_gradients(self, at: int) -> Iterator[None]:
        """Those of the micro-batches before: a gradient is added to them."""
        used = self.split.used(at)
        before = [parameter.grad for parameter in used]
        for parameter in used:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        try:
            yield
        finally:
            for parameter, gradient in zip(used, before, strict=True):
                parameter.grad = gradient

    def _again(self, first: int) -> Work:
        """What code around the layers computes from the inputs alone is run by every stage; it counts where it comes
        first."""
        seen = self.path.trace
        if not any(event.free for event in seen.events[:first]):
            return Work()
        counting = Counting()
        walk = Replay(self.split.layout, seen, (first, first), {}, frozenset(), Passage.of(seen))
        with counting:
            walk.run(self.job.args, self.job.kwargs)
        return counting.work
