"""What a stage keeps of one micro-batch from its forward to its backward, weighed once, in the first step.

Counted are the tensors that autograd saves, what the stage received, and what it made for others. Parameters and
buffers are there anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.core.action import Op
from penstock.engine.acting import Acting
from penstock.engine.mark import Mark
from penstock.model.heap import Heap

WEIGHED = 0  # the micro-batch that is weighed for all

Act = Callable[[Op, int, int], None]


@dataclass
class Kept:
    """Bytes of one stage and one micro-batch; see core's Footprint for the names."""

    activations: int = 0
    until_weight: int = 0
    inputs: int = 0


class Weigh:
    """Weighs the first step's first micro-batch on every stage of a rank, and the rank's memory as a whole."""

    def __init__(self, acting: Acting, device: torch.device) -> None:
        self.acting, self.mark = acting, Mark(device)
        self.steps = 0
        self.kept = {stage: Kept() for stage in acting.stages}

    def begin(self) -> Act:
        """A step begins; returns what its compute actions go through. The first step has needs that are its own."""
        self.steps += 1
        if self.steps == 1:
            self.mark.begin()
            self.mark.restart()
            return self._weighed
        if self.steps == 2:
            self.mark.restart()
        return self.acting.act

    def _weighed(self, op: Op, stage: int, microbatch: int) -> None:
        if microbatch == WEIGHED and op in (Op.F, Op.FB):
            self._forward(op, stage)
        else:
            self.acting.act(op, stage, microbatch)
        if microbatch == WEIGHED and op is Op.I:
            self.kept[stage].until_weight = self.acting.stages[stage].queues[microbatch].held_bytes

    def _forward(self, op: Op, stage: int) -> None:
        mine, desk, kept = self.acting.stages[stage], self.acting.desk, self.kept[stage]
        heap = Heap((*mine.parameters, *mine.split.model.buffers()))
        for tensor in desk.values.get((stage, WEIGHED), {}).values():
            heap.add(tensor)
        kept.inputs = heap.bytes
        with heap.saving():
            self.acting.act(op, stage, WEIGHED)
        for (source, _, microbatch), made in desk.outgoing.items():
            for tensor in made.values() if (source, microbatch) == (stage, WEIGHED) else ():
                heap.add(tensor)
        kept.activations = heap.bytes
