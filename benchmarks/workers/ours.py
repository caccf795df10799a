"""Ours: `penstock.Pipeline`, through its public interface."""

from __future__ import annotations

import torch.distributed as dist


class Ours:
    """A Pipeline over stage modules, with a step like the peer's."""

    def __init__(self, schedule, stages, microbatches, loss, inputs, target):
        from penstock import Pipeline  # only when asked for

        rows = len(inputs) // microbatches
        asked = {"schedule": schedule, "microbatches": microbatches, "loss": loss, "verify": False}
        self.pipe = Pipeline(stages, example=inputs[:rows], **asked)
        self.inputs, self.target, self.last = inputs, target, None

    def zero(self):
        self.pipe.model.zero_grad()

    def step(self):
        self.last = self.pipe.step(self.inputs, self.target)

    def loss(self):
        return self.last.loss

    def gradients(self):
        """Of this rank's stage, under the stage's own names."""
        stage = self.pipe.model.stages[dist.get_rank()]
        return {name: parameter.grad for name, parameter in stage.named_parameters()}

    def held(self):
        """The most bytes of received tensors that were in use at once; each lane at its own worst."""
        return sum(end.shared.most_bytes_held for end in self.pipe.context.lanes.receivers.values())

    def slots(self):
        """Bytes of shared memory that this rank has made for what it sends, in use or not, by the stage it goes to."""
        found = {}
        for name, end in self.pipe.context.lanes.senders.items():
            found[name.target] = found.get(name.target, 0) + end.shared.bytes
        return found
