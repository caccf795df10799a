"""A split model against the whole one: outputs, loss and every gradient."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from zoo import score

import penstock
from penstock.model import tree
from penstock.model.batch import as_call, join, rows_of

PARTS = 3


def pieces(inputs: Any, parts: int) -> list[Any]:
    rows = rows_of(inputs)
    ends = [rows * part // parts for part in range(parts + 1)]
    return [tree.replace(inputs, lambda t, a=a, b=b: t[a:b] if t.dim() else t) for a, b in pairwise(ends)]


def call(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = as_call(inputs)
    return model(*args, **kwargs)


def plain(model: nn.Module, inputs: Any, loss: Any = score, parts: int = 1) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole model, by a loop over micro-batches where parts > 1."""
    model = copy.deepcopy(model)
    model.zero_grad()
    rows = rows_of(inputs)
    total = 0.0
    for part in pieces(inputs, parts):
        share = rows_of(part) / rows
        value = loss(call(model, part), None) * share
        value.backward()
        total += value.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def stepped(pipe: penstock.Pipeline, inputs: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step of a pipeline without an optimizer."""
    pipe.model.zero_grad()
    found = pipe.step(inputs).loss
    return found, {name: p.grad for name, p in pipe.model.named_parameters() if p.grad is not None}


def off(found: Tensor, wanted: Tensor) -> float:
    """Distance in parts of the norm; what is nothing but rounding (a bias of attention keys) must be so in both."""
    scale = float(wanted.norm())
    return float(found.norm() > 1e-12) if scale < 1e-13 else float((found - wanted).norm()) / scale


def assert_same(found: tuple[float, dict[str, Tensor]], wanted: tuple[float, dict[str, Tensor]], to: float = 1e-12):
    assert abs(found[0] - wanted[0]) <= to * max(abs(wanted[0]), 1.0)
    assert found[1].keys() == wanted[1].keys()
    wrong = {name: off(found[1][name], g) for name, g in wanted[1].items() if off(found[1][name], g) > to}
    assert not wrong


def assert_same_result(found: Any, wanted: Any, to: float = 1e-12) -> None:
    assert type(found) is type(wanted)
    ours, theirs = ([t.detach() for t in tree.tensors(value)] for value in (found, wanted))
    assert [t.shape for t in ours] == [t.shape for t in theirs]
    assert all(off(a.double(), b.double()) <= to for a, b in zip(ours, theirs, strict=True))


def pipeline(model: nn.Module | list[nn.Module], example: Any, **options: Any) -> penstock.Pipeline:
    settings = {"schedule": "1f1b", "microbatches": PARTS, "loss": score, **options}
    return penstock.Pipeline(model, example=example, **settings)


def check(
    model: nn.Module, example: Any, batches: list[Any], by_parts: bool = False, **options: Any
) -> penstock.Pipeline:
    """Train and eval, on every batch: the pipeline gives what the whole model gives."""
    pipe = pipeline(model, example, **options)
    for training in (True, False, True):
        model.train(training)
        for inputs in batches:
            wanted = plain(model, inputs, parts=PARTS if by_parts else 1)
            assert_same(stepped(pipe, inputs), wanted)
        if not training:
            with torch.no_grad():
                parts = pieces(inputs, PARTS if by_parts else 1)
                wanted = join([call(model, part) for part in parts], [rows_of(part) for part in parts])
                assert_same_result(pipe.forward(inputs), wanted)
    return pipe
