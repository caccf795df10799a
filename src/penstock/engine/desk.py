"""What waits for the stages of one process: values for a forward, gradients for a backward, parts to be sent.

Each is handed out once and then forgotten here. Where several later stages used a value, their gradients for it are
added from the last stage to the first, whatever order they came in: so the sum has the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Container

from penstock.engine.transport.wire import carried
from penstock.model.stage import Job, Values

Place = tuple[int, int]  # a stage and a micro-batch


class Desk:
    """`here` are the stages of this process."""

    def __init__(self, here: Container[int]) -> None:
        self.here = here
        self.values: dict[Place, Values] = {}
        self.gradients: dict[Place, dict[int, Values]] = {}
        self.outgoing: dict[tuple[int, int, int], Values] = {}  # by stage from, stage to and micro-batch

    def hand_on(self, job: Job, source: int, made: Values) -> None:
        """What a forward made, to the stages that read it."""
        for target, values in job.path.routes[source].items():
            part = {value: carried(made[value]) for value in values}
            if target in self.here:
                self.put(target, job.number, part)
            else:
                self.outgoing[source, target, job.number] = part

    def put(self, target: int, microbatch: int, part: Values) -> None:
        self.values.setdefault((target, microbatch), {}).update(part)

    def take(self, stage: int, microbatch: int) -> Values:
        return self.values.pop((stage, microbatch), {})

    def hand_back(self, job: Job, reader: int, gradients: Values) -> None:
        """Gradients of what a stage has read, to the stages that made it."""
        by_maker: dict[int, Values] = {}
        for value, maker in job.path.incoming[reader].items():
            if value in gradients:
                by_maker.setdefault(maker, {})[value] = carried(gradients[value])
        for maker, part in by_maker.items():
            if maker in self.here:
                self.put_back(maker, job.number, reader, part)
            else:
                self.outgoing[reader, maker, job.number] = part

    def put_back(self, maker: int, microbatch: int, reader: int, part: Values) -> None:
        self.gradients.setdefault((maker, microbatch), {})[reader] = part

    def take_back(self, stage: int, microbatch: int) -> Values:
        parts = self.gradients.pop((stage, microbatch), {})
        total: Values = {}
        for reader in sorted(parts, reverse=True):
            for value, gradient in parts[reader].items():
                total[value] = total[value] + gradient if value in total else gradient
        return total

    def leave(self, source: int, target: int, microbatch: int) -> Values:
        """What is to be sent from one stage to another; a stage may have nothing to say to its neighbour."""
        return self.outgoing.pop((source, target, microbatch), {})
