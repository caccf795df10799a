"""Pipelines whose stages have replicas, compared with plain training of the whole batch in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plain
from penstock import Pipeline

PATTERNS = ([2], [4], [2, 1], [1, 3], [2, 3], [2, 2], [2, 1, 2])
METHODS: dict[str, dict[str, Any]] = {
    "gpipe": {}, "1f1b": {}, "dapple": {"policy": "pb"}, "interleaved": {}, "zb-h1": {}, "zb-v": {},
}  # fmt: skip
EXACT = 1e-10


def pipeline(given: plain.Case, replicas: Sequence[int], **options: Any) -> Pipeline:
    options = {
        "example": given.example, "loss": given.loss, "optimizer": plain.adamw, "microbatches": 4,
        "stages": len(replicas),
    } | options  # fmt: skip
    return Pipeline(given.fresh(), replicas=list(replicas), **options)


def agree(given: plain.Case, replicas: Sequence[int], whole: Any = None, **options: Any) -> Pipeline:
    """Train a case, and have it compared with `whole`: the losses and the model of plain training, trained here where
    they are not given."""
    losses, model = plain.trained(given) if whole is None else whole
    pipe = pipeline(given, replicas, **options)
    found = [step.loss for step in pipe.train(given.batches)]
    assert found == pytest.approx(losses, rel=EXACT)
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < EXACT
    return pipe


def parts_of_replicas(value: Tensor, microbatches: int, replicas: int) -> list[list[Tensor]]:
    """The rows of each replica, in a list for each micro-batch; some may be empty."""
    parts = plain.parts_of(value, min(microbatches, len(value)))
    return [plain.parts_of(part, replicas) for part in parts]


def forward_by_parts(
    stages: Sequence[nn.Module], replicas: Sequence[int], x: Tensor, note: Callable[[int, Tensor], None] | None = None
) -> Tensor:
    """One micro-batch through stages of which each replica runs its part of the rows apart from the others."""
    for stage, count in zip(stages, replicas, strict=True):
        x = torch.cat([stage(part) for part in plain.parts_of(x, count) if len(part)])
    return x
