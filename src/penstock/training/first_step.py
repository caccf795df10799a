"""Checks around the first step: the split model against the whole one, the step's loss against the whole batch's.

Before the first step, loss and gradients of the split model are compared with the whole model's on the example. After
it, the first batch's loss is compared with that of its micro-batches: a mean that hides its weights shows there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from penstock.core.action import Op
from penstock.engine.stage_executor import StageExecutor, never_split
from penstock.errors import InputError, SplitError
from penstock.model import tree
from penstock.model.batch import join, piece, spans
from penstock.model.batchnorm import DeferredNorms
from penstock.model.buffers import Buffers
from penstock.model.labels import Labels, Memory
from penstock.model.loss import Loss, read_loss, total_of
from penstock.model.mean_loss import Part, weight_of
from penstock.model.passage import Passage
from penstock.model.replay import Replay
from penstock.model.split import Split
from penstock.model.stage import Job, Settings, Stage
from penstock.model.untouched import copied, untouched
from penstock.model.walk import watching

Found = dict[str, torch.Tensor]  # gradients by name, and under no name what they are gradients of

SPLIT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of a tensor's norm; lower precisions: 1e-1
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}  # of the largest gradient: what is smaller may be rounding alone


def compare_with_whole(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
    """Run the example through the whole model and through its stages; refuse the split unless results and gradients
    agree. A model that does not fit as a whole is not compared."""
    try:
        whole = _whole(split, args, kwargs)
    except torch.OutOfMemoryError:
        warnings.warn(
            "expected memory for the example's forward and backward through the whole model, but got too little; the "
            "split is not compared with it: give a smaller example, or verify=False",
            stacklevel=3,
        )
        return
    if not all(isfinite(found.norm()) for found in whole.values()):
        raise InputError(
            "an example on which the model's result and gradients are finite",
            "one on which they are not",
            "give a usual batch as the example, or verify=False",
        )
    parts = _in_parts(split, args, kwargs, device)
    biggest = max((float(gradient.norm()) for name, gradient in whole.items() if name), default=0.0)
    for name in whole | parts:
        _require_close(name, whole.get(name), parts.get(name), biggest)


def _require_close(name: str, wanted: torch.Tensor | None, found: torch.Tensor | None, biggest: float) -> None:
    what = f"gradient of {name!r}" if name else "result"
    if wanted is None or found is None:
        come = "one where there should be none" if wanted is None else "none"
        raise SplitError(f"the split model to have the whole model's {what}", come, "cut elsewhere, and tell us")
    scale, off = float(wanted.norm()), float((wanted - found).norm())
    if not off <= SPLIT_TOLERANCE.get(wanted.dtype, 1e-1) * scale + ROUNDING.get(wanted.dtype, 1e-2) * biggest:
        raise SplitError(
            f"the split model to have the whole model's {what}",
            f"one that is {off / max(scale, 1e-30):.1e} of its norm away",
            "cut elsewhere; or if the model draws numbers of its own on each forward, give verify=False",
        )


def _whole(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    with untouched(split.model, split.first.trace.generators, split.first.trace.written), torch.enable_grad():
        args, kwargs = copied((args, kwargs))
        return _stage_gradients(split, _weighed(_plain_result(split, args, kwargs)))


def _plain_result(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the model itself; where its own code draws random numbers, of the same draws as the stages'."""
    seen = split.first.trace
    if not seen.draws:
        return split.model(*args, **kwargs)
    whole = (0, len(seen.events))
    return Replay(split.layout, seen, whole, {}, frozenset(), Passage(), chance=seen.chance).run(args, kwargs)


def _in_parts(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Found:
    """The same, stage by stage, as they will run: values are cut off their history, gradients are handed back."""
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
        found = gradients()
        total = executor.ordered_results[0].value
    return found | {"": total.detach().to(next((g.dtype for g in found.values()), total.dtype))}


@contextmanager
def _gradients_apart(split: Split) -> Iterator[Callable[[], Found]]:
    """Gradients made in here, by name; `.grad` is then as before."""
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
    """Something to differentiate: all results that can be, each number with a weight of its own.

    A plain sum would tell nothing of a model that ends in a softmax or a normalisation.
    """
    source = torch.Generator().manual_seed(0)
    found = []
    for tensor in tree.tensors(result):
        if tensor.requires_grad:
            weights = torch.randn(tensor.shape, generator=source, dtype=torch.float64, device="cpu").to(tensor.device)
            found.append((tensor * weights).sum())
    if not found:
        raise SplitError(
            "a model whose result requires grad",
            "one that does not",
            "unfreeze parameters, or do not detach the result",
        )
    return torch.stack(found).real.sum()


def _stage_gradients(split: Split, total: torch.Tensor) -> Found:
    """The gradient of every parameter that has one, by name, and under no name what they are gradients of. By way of
    `.grad`, as training does it: a backward of the user's may call another one, whose gradients are nowhere else."""
    with _gradients_apart(split) as gradients:
        total.backward()  # type: ignore[no-untyped-call]
        found = gradients()
    dtype = next((gradient.dtype for gradient in found.values()), total.dtype)
    return found | {"": total.detach().to(dtype)}


LOSS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the loss, or its gradient; lower precisions: 1e-2

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Compared:
    """The results of a batch, of its micro-batches and at once; and the micro-batches' losses."""

    loss: LossFunction
    inputs: Any
    target: Any
    rows: int
    parts: list[Any]
    losses: list[Loss] | None  # None where a step would refuse them
    whole: Any

    def hidden(self) -> tuple[float, float] | None:
        """The loss as a whole and over micro-batches, where a mean hides its weights; None where not."""
        value = self._tried(self.whole)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            return None
        scalars = self._scalars()
        if any(torch.equal(scalar, value) for scalar in scalars):
            mean = None if self.losses is None or len(scalars) > 1 else total_of(self.losses).mean
            return None if mean is None or not self._apart(value, mean) else (float(value), mean)
        return self._outside()

    def coupled(self) -> tuple[float, float] | None:
        """The same two, where the model makes another result of a row when others are beside it."""
        if self._scalars():
            return None
        whole, found = self._tried(self.whole), self._mean(self.parts)
        if found is None or whole is None:
            return None
        at_once, mean = total_of([read_loss(whole, self.rows)]).mean, total_of(found).mean
        return (at_once, mean) if self._apart(at_once, mean) else None

    def _outside(self) -> tuple[float, float] | None:
        """The same two of a loss that is computed from the model's result."""
        parts = [tree.replace(part, _leaf) for part in self.parts]
        with torch.enable_grad():
            try:
                together = self.loss(join(parts, [last - first for first, last in self._cuts()]), self.target)
            except Exception:
                return None  # results that no rows can be seen in, or too large as a whole
            found = self._mean(parts)
            if found is None or not isinstance(together, torch.Tensor) or together.numel() != 1:
                return None
            weight = sum(float(one.weight) for one in found)
            mean = torch.stack([one.value * (one.times / weight) for one in found]).sum()
            if not (together.requires_grad and mean.requires_grad):
                return (float(together), float(mean)) if self._apart(together, mean) else None
            wanted, got = _loss_gradients(together, parts), _loss_gradients(mean, parts)
        if not _differ(torch.cat(wanted), torch.cat(got), self._rough()):
            return None
        if all(_parallel(one, other, self._rough()) for one, other in zip(wanted, got, strict=True)):
            _refuse_weights(wanted, got)
        return float(together), float(mean)

    def _mean(self, results: list[Any]) -> list[Loss] | None:
        """The losses of micro-batches' results, as a step would find them; None where a step would refuse them."""
        labels, found = Labels((self.inputs, self.target), self._cuts(), Memory(), weight_of), []
        try:
            for number, (result, (first, last)) in enumerate(zip(results, self._cuts(), strict=True)):
                with Part(labels, number):
                    value = self.loss(result, piece(self.target, first, last, self.rows))
                    found.append(read_loss(value, last - first))
        except Exception:
            return None
        return found if sum(float(one.weight) for one in found) > 0 else None

    def _cuts(self) -> list[tuple[int, int]]:
        return spans(self.rows, len(self.parts))

    def _scalars(self) -> list[torch.Tensor]:
        """Losses that the model computed itself, perhaps: its own, a balance loss."""
        return [t for t in tree.tensors(self.whole) if t.dim() == 0 and t.is_floating_point()]

    def _tried(self, result: Any) -> Any:
        try:
            return self.loss(result, self.target)
        except Exception:
            return None  # not to be had in eval mode, or too large as a whole: nothing to compare with

    def _rough(self) -> float:
        found = [t for t in tree.tensors(self.whole) if t.is_floating_point()]
        return max((LOSS_TOLERANCE.get(t.dtype, 1e-2) for t in found), default=1e-4)

    def _apart(self, a: Any, b: Any) -> bool:
        return abs(float(a) - float(b)) > self._rough() * max(abs(float(a)), abs(float(b)), 1e-6)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _loss_gradients(total: torch.Tensor, parts: list[Any]) -> list[torch.Tensor]:
    """The gradient by each micro-batch's result, as one row of numbers."""
    leaves = [[t for t in tree.tensors(part) if t.requires_grad] for part in parts]
    every = [leaf for some in leaves for leaf in some]
    found: Iterator[torch.Tensor] = iter(torch.autograd.grad(total, every, allow_unused=True, materialize_grads=True))
    return [torch.cat([_numbers(next(found)) for _ in some]) for some in leaves]


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(gradient) if gradient.is_complex() else gradient).flatten().double()


def _differ(one: torch.Tensor, other: torch.Tensor, rough: float) -> bool:
    return bool((one - other).norm() > rough * max(one.norm(), other.norm()))


def _parallel(one: torch.Tensor, other: torch.Tensor, rough: float) -> bool:
    square = float(other.dot(other))
    return not _differ(one, other * (float(one.dot(other)) / square if square else 0.0), rough)


def _refuse_weights(wanted: list[torch.Tensor], got: list[torch.Tensor]) -> None:
    shares = [float(one.norm() / max(float(other.norm()), 1e-300)) for one, other in zip(wanted, got, strict=True)]
    raise InputError(
        "a loss that is a mean over rows, or (sum, weight)",
        "a mean that weighs rows differently: in the whole batch's, micro-batches count "
        f"{', '.join(f'{share:.3g}' for share in shares[:8])}{' ...' if len(shares) > 8 else ''} times their rows",
        "return (sum, weight) from the loss",
    )


def warn_hidden(whole: float, mean: float, parts: str) -> None:
    warnings.warn(
        f"expected the whole batch's loss to be the mean over its rows, but got {whole:.6g} for the whole and "
        f"{mean:.6g} over {parts}; return (sum, weight) from the loss, so that all rows count right. One "
        "that is taken inside forward is taken outside for that, in loss=; one that compares rows with each other, as "
        "a contrastive loss does, sees those of one micro-batch alone: give microbatches=1",
        stacklevel=5,
    )


def warn_coupled(whole: float, mean: float, parts: str) -> None:
    warnings.warn(
        f"expected a model whose result for one row does not depend on the others, but got a loss of {whole:.6g} for "
        f"the whole batch and {mean:.6g} over {parts}; give inputs whose first dimension is the rows "
        "(batch_first=True, say), or know that layers which mix rows see one micro-batch at a time",
        stacklevel=5,
    )
