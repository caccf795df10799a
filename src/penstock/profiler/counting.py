"""Counts the operations that run while it is on, forward or backward, on real tensors or fake ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from penstock.profiler.operations import Operation, operation

Work = Counter[Operation]


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`work` is all that has run since it was made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: Work = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        found = operation(func, args, kwargs, result)
        if found is not None:
            self.work[found] += 1
        return result


def flops(work: Work) -> int:
    return sum(one.flops * times for one, times in work.items())


def moved(work: Work) -> int:
    """Bytes."""
    return sum(one.bytes * times for one, times in work.items())
