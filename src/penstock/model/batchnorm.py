"""Batch normalisation with micro-batches: each normalises by its own statistics, as in a plain loop over them, and the
running averages are updated once a step from the whole batch, with the unbiased variance."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_NOTHING = nullcontext()
Place = tuple[int, int, int]  # stage, call in the forward, replica
Statistics = tuple[int, list[float], list[float]]  # count, mean, squares
_TORCHS_OWN = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class _Seen:
    """Mean and sum of squared deviations of a norm's inputs so far, merged as by Chan et al."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: torch.Tensor | float = 0.0
        self.squares: torch.Tensor | float = 0.0

    def add(self, x: torch.Tensor) -> None:
        over = [d for d in range(x.dim()) if d != 1]
        count = x.numel() // x.shape[1]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        variance, mean = torch.var_mean(wide, over, correction=0)
        mean = mean.double()
        self.join(count, mean, variance.double() * count)

    def join(self, count: int, mean: torch.Tensor, squares: torch.Tensor) -> None:
        """Add what others have been given."""
        off, total = mean - self.mean, self.count + count
        self.mean = self.mean + off * (count / total)
        self.squares = self.squares + squares + off.square() * (self.count * count / total)
        self.count = total


def is_deferred(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether torch's own forward updates the running averages; a class with its own forward is left alone."""
    return isinstance(module, _BatchNorm) and type(module).forward in _TORCHS_OWN


class DeferredNorms:
    """Deferral of a model's running averages: they are not updated by the forwards of a step, but at its end.

    A norm that a forward calls several times is updated several times: by its first calls in all micro-batches, then by
    its second calls, and so on.
    """

    def __init__(self, model: nn.Module) -> None:
        self.norms = [m for m in model.modules() if is_deferred(m) and m.running_mean is not None]
        self.held: list[_BatchNorm] = []
        self.stage: int | None = None  # whose forward runs; nobody's: a trace, or a checkpoint inside a backward
        self.counts = True  # not while a forward is run a second time
        self.calls: dict[nn.Module, int] = {}  # in the forward that runs
        self.step = 0  # whose forward runs
        self.replica = 0
        self.seen: dict[int, dict[_BatchNorm, dict[Place, _Seen]]] = {}  # by step

    def forward(self, stage: int, step: int, replica: int = 0) -> AbstractContextManager[None]:
        """Return the context for a forward of a stage."""
        return self._forward(stage, step, replica) if self.norms else _NOTHING

    @contextmanager
    def _forward(self, stage: int, step: int, replica: int) -> Iterator[None]:
        self.stage, self.step, self.replica, self.calls = stage, step, replica, {}
        try:
            yield
        finally:
            self.stage = None

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Do not count a forward that was counted already."""
        self.counts = False
        try:
            yield
        finally:
            self.counts = True

    def __enter__(self) -> DeferredNorms:
        self.held = [norm for norm in self.norms if norm.training and norm.track_running_stats]
        self.handles = [norm.register_forward_pre_hook(self._gather, with_kwargs=True) for norm in self.held]
        for norm in self.held:
            norm.track_running_stats = False  # so a training forward neither reads nor writes them
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.forget()  # a failed step does not count
        for handle in self.handles:
            handle.remove()
        for norm in self.held:
            norm.track_running_stats = True

    def forget(self) -> None:
        """Discard the statistics collected so far."""
        self.seen.clear()

    def move(self) -> None:
        """Update the running averages by all steps that have not updated them yet."""
        for step in sorted(self.seen):
            self.move_by(step)

    def move_by(self, step: int) -> None:
        """Update the running averages by one step."""
        with torch.no_grad():
            for norm, calls in self.seen.pop(step, {}).items():
                for place in sorted({(stage, call) for stage, call, _ in calls}):
                    _move(norm, _joined([calls[key] for key in sorted(calls) if key[:2] == place]))

    def statistics(self, step: int) -> dict[str, Statistics]:
        """Return what this process has seen in one step, by the norms' places in the model, for others to take in."""
        norms = {norm: at for at, norm in enumerate(self.norms)}
        return {
            f"{norms[norm]} {' '.join(map(str, place))}": (seen.count, _listed(seen.mean), _listed(seen.squares))
            for norm, calls in self.seen.get(step, {}).items()
            for place, seen in calls.items()
        }

    def take_in(self, step: int, statistics: dict[str, Statistics], stages: Container[int]) -> None:
        """Count what other replicas of these stages have seen, as if it had been seen here."""
        for words, (count, mean, squares) in statistics.items():
            at, stage, call, replica = map(int, words.split())
            by_norm = self.seen.setdefault(step, {}).setdefault(self.norms[at], {})
            if stage in stages and (stage, call, replica) not in by_norm:
                device = next(self.norms[at].buffers()).device
                seen = by_norm[stage, call, replica] = _Seen()
                seen.count = count
                seen.mean, seen.squares = (
                    torch.tensor(values, dtype=torch.float64, device=device) for values in (mean, squares)
                )

    def _gather(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.stage is not None and self.counts and norm.training:
            assert isinstance(norm, _BatchNorm)
            call = self.calls[norm] = self.calls.get(norm, -1) + 1
            with torch.no_grad():
                by_norm = self.seen.setdefault(self.step, {}).setdefault(norm, {})
                seen = by_norm.setdefault((self.stage, call, self.replica), _Seen())
                seen.add(args[0] if args else kwargs["input"])


def _joined(parts: list[_Seen]) -> _Seen:
    """Return what all replicas were given together, joined in their order."""
    if len(parts) == 1:
        return parts[0]
    together = _Seen()
    for part in parts:
        assert isinstance(part.mean, torch.Tensor)
        assert isinstance(part.squares, torch.Tensor)
        together.join(part.count, part.mean, part.squares)
    return together


def _listed(values: torch.Tensor | float) -> list[float]:
    assert isinstance(values, torch.Tensor)
    return values.tolist()


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
