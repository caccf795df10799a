"""The same training in one plain process, without stages and schedule, to compare a pipeline with.

`python -m penstock.app.run.plain CONFIG` times some steps of it and prints the result as JSON, a line for each number
of threads.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from penstock.app.config.task import Task
from penstock.engine.measure.peak_memory import PeakMemory
from penstock.model.batch import spans
from penstock.model.labels import Labels, Memory
from penstock.model.loss import read_loss
from penstock.model.mean_loss import Part, weight_of
from penstock.training.optimizer_step import advance, update

LONGEST = 15.0  # seconds to spend on one timing
# A run with more threads that takes this many times as long was disturbed by other processes, and is ignored.
DISTURBED = 1.5
MORE = 2.0  # further seconds that a timing with more threads may take


class PlainTraining:
    """A loop over micro-batches that accumulates gradients, then clips and steps."""

    def __init__(self, task: Task) -> None:
        section = task.config.pipeline
        self.model, self.loss = task.model(), task.loss
        self.parts, self.clip = section.microbatches, section.clip
        self.memory = Memory()
        named = dict(self.model.named_parameters())
        self.optimizer = task.optimizer(list(named), list(named.values()))
        self.scheduler = task.scheduler(self.optimizer) if task.scheduler else None
        self.kind = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}[task.precision]

    def step(self, inputs: Any, target: Any) -> float:
        """Train one batch and return the mean loss. Gradients stay in `.grad` until the next step."""
        self.optimizer.zero_grad()
        total, weight, rows = 0.0, 0.0, _rows(inputs)
        for summed, share in self._parts(inputs, target):
            summed.backward(torch.full_like(summed, 1 / rows))  # type: ignore[no-untyped-call]
            total, weight = total + summed.item(), weight + share
        for parameter in self.model.parameters():
            if parameter.grad is not None and weight != rows:
                parameter.grad /= weight / rows
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        update(self.optimizer)
        if self.scheduler is not None:
            advance(self.scheduler, total / weight)
        return total / weight

    def losses(self, inputs: Any, target: Any) -> list[float]:
        """Return the loss of each micro-batch, by forwards alone."""
        with torch.no_grad():
            return [summed.item() for summed, _ in self._parts(inputs, target)]

    def _parts(self, inputs: Any, target: Any) -> Iterator[tuple[Tensor, float]]:
        """Yield each micro-batch's summed loss and its weight."""
        rows = _rows(inputs)
        labels = Labels((inputs, target), spans(rows, self.parts), self.memory, weight_of)
        for part in range(self.parts):
            first, last = rows * part // self.parts, rows * (part + 1) // self.parts
            with Part(labels, part):
                loss = read_loss(self._scored(_cut(inputs, first, last), _cut(target, first, last)), last - first)
            yield loss.value * loss.times, float(loss.weight)

    def _scored(self, inputs: Any, target: Any) -> Any:
        with torch.autocast("cpu", dtype=self.kind) if self.kind else nullcontext():
            if isinstance(inputs, dict):
                result = self.model(**inputs)
            else:
                result = self.model(*inputs) if isinstance(inputs, (tuple, list)) else self.model(inputs)
            return self.loss(result, target)


def _cut(value: Any, first: int, last: int) -> Any:
    if isinstance(value, Tensor):
        return value[first:last] if value.dim() else value
    if isinstance(value, dict):
        return {key: _cut(part, first, last) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(part, first, last) for part in value)
    return value


def _rows(value: Any) -> int:
    if isinstance(value, Tensor):
        return len(value) if value.dim() else 0
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return max(map(_rows, parts), default=0)


def timed(task: Task, steps: int, threads: list[int]) -> Iterator[dict[str, float]]:
    """Yield, for each number of threads, the median seconds of a step without the first, and the peak bytes: of
    weights, and of training beside them. They are counted as a pipeline's ranks count theirs."""
    plain, peak = PlainTraining(task), PeakMemory(torch.device("cpu"))
    weights = sum(parameter.numel() * parameter.element_size() for parameter in plain.model.parameters())
    peak.begin()
    for count in threads:
        torch.set_num_threads(count)
        seconds: list[float] = []
        for inputs, target in task.batches(0, steps + 1):
            begun = perf_counter()
            plain.step(inputs, target)
            seconds.append(perf_counter() - begun)
            if len(seconds) == 1:
                peak.restart()
            elif sum(seconds) > LONGEST:
                break
        yield {"threads": count, "seconds": median(seconds[1:]), "memory": weights + peak.added()}


def main() -> None:
    from penstock.app.run.request import Request

    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--changes", type=json.loads, default={})
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    task = Request(arguments.config, arguments.changes).task()
    begun, limit = perf_counter(), None
    for figures in timed(task, arguments.steps, arguments.threads):
        print(json.dumps(figures), flush=True)
        if limit is None:  # threads that compete for busy cores can take minutes for a step
            limit = threading.Timer(DISTURBED * (perf_counter() - begun) + MORE, os._exit, (0,))
            limit.daemon = True
            limit.start()


def _end_with_parent() -> None:
    """End when the parent process does, which closes this process's input."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
