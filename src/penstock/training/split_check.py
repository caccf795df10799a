"""Compare the split model with the whole one on the example, before the first step: its result and its gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch

from penstock.core.action import Op
from penstock.engine.stage_executor import StageExecutor, never_split
from penstock.errors import InputError, SplitError
from penstock.model import tree
from penstock.model.batchnorm import DeferredNorms
from penstock.model.buffers import Buffers
from penstock.model.loss import Loss
from penstock.model.passage import Passage
from penstock.model.replay import Replay
from penstock.model.split import Split
from penstock.model.stage import Job, Settings, Stage
from penstock.model.untouched import copied, untouched
from penstock.model.walk import watching

NamedGradients = dict[str, torch.Tensor]  # by parameter's name; under "" the number that they are gradients of

SPLIT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of a tensor's norm; lower precisions: 1e-1
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}  # of the largest gradient: what is smaller may be rounding alone


def compare_with_whole(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
    """Run the example through the whole model and through its stages; raise unless results and gradients agree.

    A model that does not fit into memory as a whole is not compared.
    """
    try:
        whole = _whole(split, args, kwargs)
    except torch.OutOfMemoryError:
        warnings.warn(
            "expected memory for the example's forward and backward through the whole model, but got too little; the "
            "split is not compared with it: give a smaller example, or verify=False",
            stacklevel=3,
        )
        return
    if not all(isfinite(gradient.norm()) for gradient in whole.values()):
        raise InputError(
            "an example on which the model's result and gradients are finite",
            "one on which they are not",
            "give a usual batch as the example, or verify=False",
        )
    parts = _in_parts(split, args, kwargs, device)
    biggest = max((float(gradient.norm()) for name, gradient in whole.items() if name), default=0.0)
    for name in whole | parts:
        _require_close(name, whole.get(name), parts.get(name), biggest)


def _require_close(name: str, whole: torch.Tensor | None, split: torch.Tensor | None, biggest: float) -> None:
    what = f"gradient of {name!r}" if name else "result"
    if whole is None or split is None:
        come = "one where there should be none" if whole is None else "none"
        raise SplitError(f"the split model to have the whole model's {what}", come, "cut elsewhere, and tell us")
    scale, off = float(whole.norm()), float((whole - split).norm())
    if not off <= SPLIT_TOLERANCE.get(whole.dtype, 1e-1) * scale + ROUNDING.get(whole.dtype, 1e-2) * biggest:
        raise SplitError(
            f"the split model to have the whole model's {what}",
            f"one that is {off / max(scale, 1e-30):.1e} of its norm away",
            "cut elsewhere; or if the model draws numbers of its own on each forward, give verify=False",
        )


def _whole(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NamedGradients:
    with untouched(split.model, split.first.trace.generators, split.first.trace.written), torch.enable_grad():
        args, kwargs = copied((args, kwargs))
        return _stage_gradients(split, _weighed(_plain_result(split, args, kwargs)))


def _plain_result(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the whole model's result, with the random draws that the stages will have."""
    trace = split.first.trace
    if not trace.draws:
        return split.model(*args, **kwargs)
    whole = (0, len(trace.events))
    return Replay(split.layout, trace, whole, {}, frozenset(), Passage(), chance=trace.chance).run(args, kwargs)


def _in_parts(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> NamedGradients:
    """Return the same from the stages as they will run: each value detached, its gradient handed back."""
    norms, buffers = DeferredNorms(split.model), Buffers(split.model)
    stages = [Stage(split, at, Settings(device), norms, buffers, []) for at in range(split.pieces)]
    executor = StageExecutor(stages, never_split)
    with (
        untouched(split.model, split.first.trace.generators, split.first.trace.written),
        torch.enable_grad(),
        _gradients_apart(split) as gradients,
    ):
        args, kwargs = copied((args, kwargs))
        # Step -1: with the random numbers that the whole model had, one stage after the other.
        chance = split.first.trace.chance
        path = split.path(args, kwargs, chance=chance)
        job = Job(0, -1, args, kwargs, 1, path, lambda result: Loss(_weighed(result), 1.0), chance=chance)
        executor.begin([job])
        with watching():
            for stage in range(split.pieces):
                executor.run(Op.F, stage, 0)
            for stage in reversed(range(split.pieces)):
                executor.run(Op.B, stage, 0)
        by_name = gradients()
        total = executor.ordered_results[0].value
    return by_name | {"": total.detach().to(next((g.dtype for g in by_name.values()), total.dtype))}


@contextmanager
def _gradients_apart(split: Split) -> Iterator[Callable[[], NamedGradients]]:
    """Yield a function that returns the gradients made inside, by name; `.grad` is restored at the end."""
    named = dict(split.model.named_parameters())
    before = {name: parameter.grad for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = None
    try:
        yield lambda: {name: p.grad for name, p in named.items() if p.grad is not None}
    finally:
        for name, parameter in named.items():
            parameter.grad = before[name]


def _weighed(result: Any) -> torch.Tensor:
    """Return a scalar to differentiate: the sum of all results that require grad, each number with its own weight.

    A plain sum would be constant for a model that ends in a softmax or a normalisation.
    """
    source = torch.Generator().manual_seed(0)
    parts = []
    for tensor in tree.tensors(result):
        if tensor.requires_grad:
            weights = torch.randn(tensor.shape, generator=source, dtype=torch.float64, device="cpu").to(tensor.device)
            parts.append((tensor * weights).sum())
    if not parts:
        raise SplitError(
            "a model whose result requires grad",
            "one that does not",
            "unfreeze parameters, or do not detach the result",
        )
    return torch.stack(parts).real.sum()


def _stage_gradients(split: Split, total: torch.Tensor) -> NamedGradients:
    """Return the gradient of every parameter that has one, by name, and under "" the number they are gradients of.

    Through `.grad`, as in training: a backward of the user's may call another one, whose gradients appear only there.
    """
    with _gradients_apart(split) as gradients:
        total.backward()  # type: ignore[no-untyped-call]
        by_name = gradients()
    dtype = next((gradient.dtype for gradient in by_name.values()), total.dtype)
    return by_name | {"": total.detach().to(dtype)}
