"""A model of stage modules that a user made: each takes the result of the one before."""

from __future__ import annotations

from typing import Any

from torch import nn


class Chain(nn.Module):
    """A sequence of modules. A tuple that one returns is the next one's positional arguments, a dict its keywords,
    anything else a single argument."""

    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result: Any = None
        for stage in self.stages:
            result = stage(*args, **kwargs)
            args, kwargs = (
                (result, {})
                if isinstance(result, tuple)
                else ((), result)
                if isinstance(result, dict)
                else ((result,), {})
            )
        return result
