"""The activation store of one process: values that wait for a forward, gradients that wait for a backward, and tensors
that wait to be sent.

Each is taken once and then forgotten. Where several later stages used a value, their gradients for it are added from
the last stage to the first, whatever the order of arrival, so that the sum has the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Container

from penstock.comm.transport.wire import carried
from penstock.model.stage import Job, Values

Place = tuple[int, int]  # a stage and a micro-batch


class ActivationStore:
    """Values and gradients of the micro-batches in flight; `here` are the stages of this process."""

    def __init__(self, here: Container[int]) -> None:
        self.here = here
        self.values: dict[Place, Values] = {}
        self.gradients: dict[Place, dict[int, Values]] = {}
        self.outgoing: dict[tuple[int, int, int], Values] = {}  # by stage from, stage to and micro-batch

    def put_outputs(self, job: Job, source: int, outputs: Values) -> None:
        """Keep what a forward returned for the stages that read it."""
        for target, values in job.path.routes[source].items():
            part = {value: carried(outputs[value]) for value in values}
            if target in self.here:
                self.put_values(target, job.number, part)
            else:
                self.outgoing[source, target, job.number] = part

    def put_values(self, target: int, microbatch: int, part: Values) -> None:
        """Keep values that a stage here will read in its forward."""
        self.values.setdefault((target, microbatch), {}).update(part)

    def take_values(self, stage: int, microbatch: int) -> Values:
        """Return the values that a forward reads, and forget them."""
        return self.values.pop((stage, microbatch), {})

    def put_input_gradients(self, job: Job, reader: int, gradients: Values) -> None:
        """Keep the gradients of what a stage has read, for the stages that computed it."""
        by_source: dict[int, Values] = {}
        for value, source in job.path.incoming[reader].items():
            if value in gradients:
                by_source.setdefault(source, {})[value] = carried(gradients[value])
        for source, part in by_source.items():
            if source in self.here:
                self.put_gradients(source, job.number, reader, part)
            else:
                self.outgoing[reader, source, job.number] = part

    def put_gradients(self, source: int, microbatch: int, reader: int, part: Values) -> None:
        """Keep one reader's gradients of what a stage here has computed."""
        self.gradients.setdefault((source, microbatch), {})[reader] = part

    def take_gradients(self, stage: int, microbatch: int) -> Values:
        """Return the gradients that a backward starts from, added over their readers, and forget them."""
        parts = self.gradients.pop((stage, microbatch), {})
        total: Values = {}
        for reader in sorted(parts, reverse=True):
            for value, gradient in parts[reader].items():
                total[value] = total[value] + gradient if value in total else gradient
        return total

    def take_outgoing(self, source: int, target: int, microbatch: int, again: bool = False) -> Values:
        """Return what one stage sends to another, and forget it unless it is asked for again, for another replica;
        there may be nothing to send."""
        place = (source, target, microbatch)
        return self.outgoing.get(place, {}) if again else self.outgoing.pop(place, {})
