"""Stage modules that a user made by hand, as one model: each takes what the one before returned."""

from __future__ import annotations

from typing import Any

from torch import nn


class Chain(nn.Module):
    """A tuple that a stage returns is the next one's arguments, a dict its keywords, anything else its one argument."""

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
