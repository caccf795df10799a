"""A training without a flush goes on from its checkpoint with the bits that it would have had without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import batch, gpt
from penstock import Pipeline

torch.set_num_threads(1)

METHODS: dict[str, dict[str, Any]] = {
    "pipedream": {},
    "2bw": {},
    "pipemare": {},
    "pipemare, forecast": {"predict": "xpipe"},
    "pipedream, forecast": {"predict": "xpipe"},
}


def _pipe(method: str, stages: int) -> Pipeline:
    name = method.split(",")[0]
    return gpt(stages, schedule=name, **METHODS[method], microbatches=4 if name == "2bw" else 1)


def _trained(pipe: Pipeline, first: int, last: int) -> list[float]:
    return [record.loss for record in pipe.train(batch(number) for number in range(first, last))]


@pytest.mark.parametrize("method", METHODS)
def test_goes_on_with_the_same_bits(method: str, tmp_path: Path) -> None:
    pipe, other = _pipe(method, 3), _pipe(method, 3)
    _trained(pipe, 0, 6)
    pipe.save(tmp_path / "six")
    losses = _trained(pipe, 6, 10)
    _trained(other, 20, 22)  # what it knows of other steps has to go
    other.load(tmp_path / "six")
    assert _trained(other, 6, 10) == losses
    for mine, theirs in zip(pipe.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("method", ["pipemare", "pipedream, forecast"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_other_stages_take_the_movement_of_each_weight(method: str, stages: int, tmp_path: Path) -> None:
    pipe, other = _pipe(method, 3), _pipe(method, stages)
    _trained(pipe, 0, 6)
    pipe.save(tmp_path / "six")
    other.load(tmp_path / "six")
    saved, taken = _movement(pipe), _movement(other)
    for name in taken.keys() & saved.keys():
        for found in taken[name]:
            assert any(torch.equal(found, one) for one in saved[name])
            assert found.any()
    assert bool(taken) == (stages > 1 or "forecast" in method)
    _trained(other, 6, 8)


def test_a_synchronous_checkpoint_begins_movement_anew(tmp_path: Path) -> None:
    synchronous, other = gpt(2), _pipe("pipemare", 2)
    synchronous.step(*batch(0))
    synchronous.save(tmp_path / "one")
    _trained(other, 0, 4)
    other.load(tmp_path / "one")
    assert all(
        not mean.any() for held in other.async_trainer.weights.every() if held.drift for mean in held.drift.delta
    )


def _movement(pipe: Pipeline) -> dict[str, list[torch.Tensor]]:
    """What each stage that uses a weight knows of its steps, by the weight's name."""
    names = {parameter: name for name, parameter in pipe.model.named_parameters()}
    found: dict[str, list[torch.Tensor]] = {}
    for held in pipe.async_trainer.weights.every():
        for kept in (held.drift.delta if held.drift else (), held.steps.of(held.steps.newest) if held.steps else ()):
            for parameter, tensor in zip(held.versions.parameters, kept or (), strict=False):
                found.setdefault(names[parameter], []).append(tensor)
    return found
