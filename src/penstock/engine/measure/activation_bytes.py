"""Bytes that a stage keeps of one micro-batch from its forward to its backward, measured once, in the first step.

Counted are the tensors that autograd saves, what the stage received, and what it made for others. Parameters and
buffers are there anyway.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow
from penstock.engine.measure.peak_memory import PeakMemory
from penstock.engine.observer import Observer, Observers
from penstock.engine.stage_executor import StageExecutor
from penstock.model.heap import Heap

MEASURED = 0  # the micro-batch that stands for all


@dataclass
class MicroBatchBytes:
    """Bytes of one stage and one micro-batch; see core's Footprint for the names."""

    activations: int = 0
    until_weight: int = 0
    inputs: int = 0


class ActivationMeter(Observer):
    """Measures the first step's first micro-batch on every stage here, and the process's memory as a whole."""

    def __init__(self, stages: StageExecutor, device: torch.device) -> None:
        self.stages, self.peak = stages, PeakMemory(device)
        self.steps = 0
        self.bytes = {stage: MicroBatchBytes() for stage in stages.stages}
        self.heap: Heap | None = None
        self.saving: AbstractContextManager[None] | None = None

    def step_begins(self, observers: Observers) -> None:
        """Watch the rows of the first step; its memory has needs that are its own, so the peak starts anew after it."""
        self.steps += 1
        if self.steps == 1:
            observers.add(self)
            self.peak.begin()
            self.peak.restart()
        elif self.steps == 2:
            observers.discard(self)
            self.peak.restart()

    def stage_begins(self, row: ActionRow) -> None:
        if row.microbatch != MEASURED or row.op not in (Op.F, Op.FB):
            return
        stage = self.stages.stages[row.stage]
        self.heap = Heap((*stage.parameters, *stage.split.model.buffers()))
        for tensor in self.stages.store.values.get((row.stage, MEASURED), {}).values():
            self.heap.add(tensor)
        self.bytes[row.stage].inputs = self.heap.bytes
        self.saving = self.heap.saving()
        self.saving.__enter__()

    def interrupted(self) -> None:
        if self.saving is not None:
            self.saving.__exit__(None, None, None)
        self.heap = self.saving = None

    def stage_ends(self, row: ActionRow) -> None:
        if row.microbatch != MEASURED:
            return
        if row.op in (Op.F, Op.FB) and self.heap is not None and self.saving is not None:
            self.saving.__exit__(None, None, None)
            for (source, _, microbatch), outputs in self.stages.store.outgoing.items():
                for tensor in outputs.values() if (source, microbatch) == (row.stage, MEASURED) else ():
                    self.heap.add(tensor)
            self.bytes[row.stage].activations = self.heap.bytes
            self.heap = self.saving = None
        elif row.op is Op.I:
            queue = self.stages.stages[row.stage].queues.get(MEASURED)
            if queue is not None:  # else this replica has no rows of the micro-batch
                self.bytes[row.stage].until_weight = queue.held_bytes
