"""Count the operations that run, forward or backward, on real or fake tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from penstock.profiler.operations import OperatorCall, call_of

Work = Counter[OperatorCall]


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts operations; `work` holds those of all its uses."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: Work = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        call = call_of(func, args, kwargs, result)
        if call is not None:
            self.work[call] += 1
        return result


def flops(work: Work) -> int:
    """Return the operations."""
    return sum(one.flops * times for one, times in work.items())


def bytes_moved(work: Work) -> int:
    """Return the bytes."""
    return sum(one.bytes * times for one, times in work.items())
