"""Seconds of every stage's operations in an inline run: what a simulation of the same run on many devices is fed with.

The engine's own functions are timed from outside, so that training without a stopwatch costs nothing. Apart from each
other are kept the stage's own forward or backward, what a method does around it (choosing and correcting weights), and
updates, also where they happen inside of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any

from penstock.app.pipeline import Pipeline
from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow
from penstock.engine.inline import InlineEngine
from penstock.engine.stream import InlineStream

Act = Callable[[Op, int, int], None]
Seconds = dict[tuple[Op, int], list[float]]  # by operation and stage


class Stopwatch:
    """Put on a pipeline before its first step."""

    def __init__(self, pipe: Pipeline) -> None:
        self.own: Seconds = defaultdict(list)  # of the stage itself, and of its updates
        self.around: Seconds = defaultdict(list)
        self.inside = 0.0  # seconds that were noted since an operation began
        engine = pipe.engine
        assert isinstance(engine, (InlineEngine, InlineStream))
        engine.acting.act = self._act(engine.acting.act)  # type: ignore[method-assign, assignment]
        if isinstance(engine, InlineStream):
            engine.compute = self._row(engine.compute)  # type: ignore[method-assign, assignment]
            engine.weights.updating = self._updating(engine.weights.updating)  # type: ignore[method-assign, assignment]
        else:
            for stage, optimizer in pipe.optimizers.optimizers.items():
                self._hook(stage, optimizer)

    def _note(self, op: Op, stage: int, seconds: float) -> None:
        self.own[Op.F if op is Op.FB else op, stage].append(seconds)
        self.inside += seconds

    def _act(self, act: Act) -> Act:
        def timed(op: Op, stage: int, microbatch: int) -> None:
            begun = perf_counter()
            act(op, stage, microbatch)
            self._note(op, stage, perf_counter() - begun)

        return timed

    def _row(self, compute: Callable[[ActionRow], None]) -> Callable[[ActionRow], None]:
        def timed(row: ActionRow) -> None:
            self.inside, begun = 0.0, perf_counter()
            compute(row)
            self.around[row.op, row.stage].append(perf_counter() - begun - self.inside)

        return timed

    def _updating(
        self, updating: Callable[[int], AbstractContextManager[None]]
    ) -> Callable[[int], AbstractContextManager[None]]:
        @contextmanager
        def timed(stage: int) -> Iterator[None]:
            begun = perf_counter()
            with updating(stage):
                yield
            self._note(Op.UPDATE, stage, perf_counter() - begun)

        return timed

    def _hook(self, stage: int, optimizer: Any) -> None:
        begun = 0.0

        def before(*_: Any) -> None:
            nonlocal begun
            begun = perf_counter()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_: self._note(Op.UPDATE, stage, perf_counter() - begun))
