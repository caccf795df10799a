"""What two workers take for a step of each plan. All plans of a model live in the same two processes, in turns."""

from __future__ import annotations

import time
from itertools import repeat

from benchmarks.truth.models import MODELS, cross_entropy
from benchmarks.workers.contest import Contest

SOME = 4  # steps of a sample


class Planned:
    """A training that is never left: a step of it is what lies between two of its records.

    A sample's first step is not counted: it finds the caches full of another plan's weights, and the ranks of a
    pipeline without a flush where a barrier has put them.
    """

    def __init__(self, name: str, plan: str) -> None:
        from penstock import Pipeline

        subject = MODELS[name]
        self.pipe = Pipeline(
            subject.model(),
            example=subject.example[0],
            plan=plan,
            loss=cross_entropy,
            optimizer=subject.optimizer,
            verify=False,
        )
        self.records = self.pipe.train(repeat(subject.batch()))

    def zero(self) -> None:
        """Nothing is left of a step."""

    def step(self) -> dict[str, float]:
        next(self.records)
        begun = time.perf_counter()
        for _ in range(SOME):
            next(self.records)
        return {"step": (time.perf_counter() - begun) / SOME}


class Plans(Contest):
    """On one rank: the pipelines of all plans, by their names."""

    products = 12

    def __init__(self, rank: int, model: str, plans: dict[str, str]) -> None:
        super().__init__({name: Planned(model, plan) for name, plan in plans.items()})
