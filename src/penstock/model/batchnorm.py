"""Batch normalisation under micro-batches: each normalises by its own statistics, as in a plain loop over them, and the
running averages move once a step by those of the whole batch, with the unbiased variance."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Seen:
    """Mean and sum of squared deviations of what a norm has been given so far, joined as Chan et al. do."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: torch.Tensor | float = 0.0
        self.squares: torch.Tensor | float = 0.0

    def add(self, x: torch.Tensor) -> None:
        over = [d for d in range(x.dim()) if d != 1]
        count = x.numel() // x.shape[1]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        variance, mean = torch.var_mean(wide, over, correction=0)
        variance, mean = variance.double(), mean.double()
        off, total = mean - self.mean, self.count + count
        self.mean = self.mean + off * (count / total)
        self.squares = self.squares + variance * count + off.square() * (self.count * count / total)
        self.count = total


class DeferredNorms:
    """Keeps the running averages of a model out of a step's forwards, and moves them at its end."""

    def __init__(self, model: nn.Module) -> None:
        self.norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        self.held: list[_BatchNorm] = []
        self.watching = False  # not while a forward is run a second time
        self.seen: dict[_BatchNorm, _Seen] = {}

    def __enter__(self) -> DeferredNorms:
        self.seen, self.watching = {}, True
        self.held = [norm for norm in self.norms if norm.training and norm.track_running_stats]
        self.handles = [norm.register_forward_pre_hook(self._gather, with_kwargs=True) for norm in self.held]
        for norm in self.held:
            norm.track_running_stats = False  # a training forward then neither reads nor writes them
        return self

    def __exit__(self, *_: object) -> None:
        self.watching = False
        for handle in self.handles:
            handle.remove()
        for norm in self.held:
            norm.track_running_stats = True

    def move(self) -> None:
        """Move the running averages by what the step has seen."""
        with torch.no_grad():
            for norm, seen in self.seen.items():
                _move(norm, seen)
        self.seen = {}

    def _gather(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.watching and norm.training:
            assert isinstance(norm, _BatchNorm)
            with torch.no_grad():
                self.seen.setdefault(norm, _Seen()).add(args[0] if args else kwargs["input"])


def _move(norm: _BatchNorm, seen: _Seen) -> None:
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    factor = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked or 1)
    for running, now in (
        (norm.running_mean, seen.mean),
        (norm.running_var, seen.squares / max(seen.count - 1, 1)),
    ):
        assert running is not None
        assert isinstance(now, torch.Tensor)
        running.mul_(1 - factor).add_(now.to(running.dtype), alpha=factor)
