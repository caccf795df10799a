"""Facts that the stages of one micro-batch exchange besides tensors, and the placeholder for results that they cannot
exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.errors import SplitError
from penstock.model.trace import Trace

Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass
class Common:
    """Results of events by their numbers, shared by all walks that would compute the same, and the shapes that open
    code read, on which they depend."""

    results: dict[int, Any] = field(default_factory=dict)
    shapes: dict[int, Shape] = field(default_factory=dict)  # by value

    def goes_by(self, value: int, shape: Shape) -> bool:
        """Whether the results belong to a forward in which a value has this shape."""
        return self.shapes.setdefault(value, shape) == shape


@dataclass
class Passage:
    """Facts that the stages of one micro-batch exchange besides tensors: shapes that open code asks for, and plain
    results."""

    shapes: dict[int, Shape] = field(default_factory=dict)  # by value
    plain: dict[int, Any] = field(default_factory=dict)  # by event: its result, with empty tensors in it
    grads: dict[int, bool] = field(default_factory=dict)  # by value: whether it needs a gradient, if unlike the trace
    common: Common = field(default_factory=Common)  # of this micro-batch, shared by stages of the same process
    fixed: Common = field(default_factory=Common)  # shared with other micro-batches of its batch, too

    def tell(self, value: int, shape: Shape) -> None:
        """Record the shape of a value. Shared results that were computed with another shape are discarded."""
        self.shapes[value] = shape
        if not self.common.goes_by(value, shape):
            self.common = Common(shapes={**self.common.shapes, value: shape})
        if not self.fixed.goes_by(value, shape):
            self.fixed = Common(shapes={**self.fixed.shapes, value: shape})

    @staticmethod
    def of(seen: Trace) -> Passage:
        """Return the facts that the stages of a traced forward would have exchanged."""
        asked = {v: (value.shape, value.dtype) for v, value in enumerate(seen.values) if value.asked}
        return Passage(asked, {at: seen.results[at] for at, event in enumerate(seen.events) if event.talks})


class Withheld:
    """A placeholder for an object in the model's result that several stages filled, so that no stage has all of it."""

    def __init__(self, kind: type) -> None:
        self.__dict__["kind"] = kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and printing are allowed
            raise AttributeError(name)
        raise SplitError(
            "results made of tensors",
            f"{name!r} of a {self.kind.__name__}, which modules of several stages filled on the side",
            "tell the model not to return it (use_cache=False, say)",
        )

    def __repr__(self) -> str:
        return f"Withheld({self.kind.__name__})"
