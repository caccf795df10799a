"""Seconds of pieces of work, by this host's clock or by events on a GPU's stream."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
Key = tuple[Any, ...]


class WorkTimer:
    """A timer: `run` times a piece of work, `read` returns the seconds since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.marks: list[tuple[Key, Any, Any]] = []

    def run(self, key: Key, work: Callable[[], Result]) -> Result:
        begun = self._now()
        result = work()
        self.marks.append((key, begun, self._now()))
        return result

    def read(self) -> dict[Key, float]:
        """Return the seconds by key; equal keys are added."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        seconds_by_key: dict[Key, float] = {}
        for key, begun, ended in self.marks:
            seconds = begun.elapsed_time(ended) / 1e3 if self.cuda else ended - begun
            seconds_by_key[key] = seconds_by_key.get(key, 0.0) + seconds
        self.marks = []
        return seconds_by_key

    def _now(self) -> Any:
        if not self.cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event
