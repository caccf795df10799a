"""Before the first step: the split model against the whole one, on the example."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from penstock.errors import SplitError
from penstock.model import tree
from penstock.model.replay import Passage
from penstock.model.split import Split
from penstock.model.untouched import copied, untouched

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of a tensor's norm; lower precisions: 1e-1
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}  # of the largest gradient: what is smaller may be rounding alone


def compare_with_whole(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
    parts = _in_parts(split, args, kwargs)
    biggest = max((float(gradient.norm()) for name, gradient in whole.items() if name), default=0.0)
    for name in whole | parts:
        _require_close(name, whole.get(name), parts.get(name), biggest)


def _require_close(name: str, wanted: torch.Tensor | None, found: torch.Tensor | None, biggest: float) -> None:
    what = f"gradient of {name!r}" if name else "result"
    if wanted is None or found is None:
        come = "one where there should be none" if wanted is None else "none"
        raise SplitError(f"the split model to have the whole model's {what}", come, "cut elsewhere, and tell us")
    scale, off = float(wanted.norm()), float((wanted - found).norm())
    if not off <= TOLERANCE.get(wanted.dtype, 1e-1) * scale + ROUNDING.get(wanted.dtype, 1e-2) * biggest:
        raise SplitError(
            f"the split model to have the whole model's {what}",
            f"one that is {off / max(scale, 1e-30):.1e} of its norm away",
            "cut elsewhere; or if the model draws numbers of its own on each forward, give verify=False",
        )


def _whole(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    with untouched(split.model), torch.enable_grad():
        args, kwargs = copied((args, kwargs))
        return _gradients(split, _weighed(split.model(*args, **kwargs)))


def _in_parts(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same, stage by stage, as one graph: values are handed on with their history."""
    with untouched(split.model), torch.enable_grad():
        path, passage = split.path(args, kwargs), Passage()
        values: dict[int, torch.Tensor] = {}
        result: Any = None
        for stage in range(split.pieces):
            received = {v: values[v].clone() if v in path.changed[stage] else values[v] for v in path.incoming[stage]}
            made, result = split.run(path, stage, received, passage, args, kwargs)
            values.update(made)
        return _gradients(split, _weighed(result))


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


def _gradients(split: Split, total: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of every parameter that has one, by name, and under no name what they are gradients of."""
    named = {name: p for name, p in split.model.named_parameters() if p.requires_grad}
    found: tuple[torch.Tensor | None, ...]
    try:
        found = torch.autograd.grad(total, list(named.values()), allow_unused=True, retain_graph=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        found = _by_backward(list(named.values()), total)  # such a checkpoint knows no other way
    gradients = {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}
    dtype = next((gradient.dtype for gradient in gradients.values()), total.dtype)
    return gradients | {"": total.detach().to(dtype)}


def _by_backward(parameters: list[torch.nn.Parameter], total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        total.backward()  # type: ignore[no-untyped-call]
        return tuple(parameter.grad for parameter in parameters)
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
