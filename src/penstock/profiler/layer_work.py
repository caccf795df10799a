"""Count the work of every layer: forward, input gradient and weight gradient, as the engine runs them.

The weights are fake, so nothing is computed or kept; the bytes that the graph would keep are added up. Of layers that
the trace shows to be equal, operator by operator, only the first is run.
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
    """The work of one layer for one micro-batch, and the bytes that its graph keeps: until its input gradient, and from
    there to its weight gradient."""

    forward: Work
    input_grad: Work
    weight_grad: Work
    kept: int
    kept_until_weight: int


@dataclass(frozen=True)
class CountedWork:
    """The work of every layer, in order, and the tensors sent between them."""

    work: tuple[LayerWork, ...]
    sent: tuple[Sent, ...]


def count_work(layers: Layers, job: Job, settings: Settings) -> CountedWork:
    """Count the work of the layers; `job` is the micro-batch, on the layers' own path."""
    norms = DeferredNorms(layers.split.model)
    with watching(), norms, torch.enable_grad():
        stages = _Stages(layers, job, settings, norms)
        work = tuple(stages.run())
    sent_values = sorted({value for values in stages.path.incoming for value in values})
    sizes = [bytes_of([stages.values[value]]) for value in sent_values]
    sent = [Sent(one.source, one.readers, size) for one, size in zip(layers.sent, sizes, strict=True)]
    return CountedWork(work, tuple(sent))


class _Stages:
    """The layers as stages, one stage for each."""

    def __init__(self, layers: Layers, job: Job, settings: Settings, norms: DeferredNorms) -> None:
        self.layers, self.job, self.settings, self.norms = layers, job, settings, norms
        self.split, self.path = layers.split, job.path
        self.buffers = Buffers(self.split.model)
        self.values: Values = {}

    def run(self) -> Iterator[LayerWork]:
        done: dict[Any, tuple[LayerWork, list[torch.Tensor]]] = {}
        for at in range(len(self.layers)):
            key, outgoing = self._signature(at), sorted(self.path.outgoing[at])
            if key not in done:
                work, outputs_by_value = self._layer(at)
                done[key] = work, [outputs_by_value[value] for value in outgoing]
            work, outputs = done[key]
            self.values.update(zip(outgoing, map(torch.empty_like, outputs), strict=True))
            yield work

    def _signature(self, at: int) -> Any:
        """Return a key that is equal for layers with equal operators and shapes."""
        trace, (first, last) = self.path.trace, self.layers[at].span
        given = [(trace.values[value].shape, trace.values[value].grad) for value in sorted(self.path.incoming[at])]
        outputs = [trace.values[value].shape for value in sorted(self.path.outgoing[at])]
        marks = tuple(event.mark for event in trace.events[first:last])
        return marks, tuple(given), tuple(outputs), at == len(self.layers) - 1

    def _layer(self, at: int) -> tuple[LayerWork, Values]:
        model = self.split.model
        stage = Stage(self.split, at, self.settings, self.norms, self.buffers, [])
        stage.sure = True  # skips the check of the loss: nothing is trained here
        received = {value: self.values[value] for value in self.path.incoming[at]}
        forward, heap = Counting(), Heap((*model.parameters(), *model.buffers()))
        for tensor in received.values():
            heap.add(tensor)
        with forward, heap.saving():
            outputs, _ = stage.forward(self.job, received)
        input_grad, weight_grad, until = self._backward(stage, received)
        own = forward.work - self._repeated_work(self.layers[at].span[0])
        return LayerWork(own, input_grad, weight_grad, heap.bytes, until), outputs

    def _backward(self, stage: Stage, received: Values) -> tuple[Work, Work, int]:
        """Return the work of the two gradients, and the bytes held between them."""
        outputs, _ = stage.forward(self.job, received, split_backward=True)
        gradients = {value: torch.empty_like(tensor) for value, tensor in outputs.items() if tensor.is_floating_point()}
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
        """Set gradients as of earlier micro-batches, to which the new ones are added."""
        used = self.split.used(at)
        before = [parameter.grad for parameter in used]
        for parameter in used:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        try:
            yield
        finally:
            for parameter, gradient in zip(used, before, strict=True):
                parameter.grad = gradient

    def _repeated_work(self, first: int) -> Work:
        """Return the work that code around the layers does from the inputs alone before a layer. Every stage repeats
        it, but only the first counts it."""
        trace = self.path.trace
        if not any(event.free for event in trace.events[:first]):
            return Work()
        counting = Counting()
        walk = Replay(self.split.layout, trace, (first, first), {}, frozenset(), Passage.of(trace))
        with counting:
            walk.run(self.job.args, self.job.kwargs)
        return counting.work
