"""State of staleness mitigation in a checkpoint: how the weights have moved.

    drift.<stage>.<name>      PipeMare's running mean of a weight's steps, as that stage has it
    step.<stage>.<name>       the last step, from which forecasts are made

Stages have their own means, of tied weights too. Where the stages differ from those that saved, a weight takes the
state that the nearest stage has saved; without any it starts from zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from penstock.engine.weights.select import Held
from penstock.training.checkpoint.files import Records
from penstock.training.pipeline_parts import PipelineParts

Tensors = dict[str, torch.Tensor]


def drift_of(pipe: PipelineParts) -> Tensors:
    """Return the tensors that this rank writes."""
    tensors: Tensors = {}
    for held, names in _every(pipe):
        for kind, kept in (("drift", _means(held)), ("step", _last(held))):
            tensors |= {f"{kind}.{held.stage}.{name}": tensor for name, tensor in zip(names, kept, strict=False)}
    return tensors


def needed_drift(pipe: PipelineParts, records: Records) -> Records:
    """Return the records that this rank reads."""
    saved = _by_weight(records)
    needed = {}
    for held, names in _every(pipe):
        kinds = [kind for kind, state in (("drift", held.drift), ("step", held.steps)) if state is not None]
        for key in (_nearest(saved, kind, held.stage, name) for kind in kinds for name in names):
            if key is not None:
                needed[key] = records[key]
    return needed


def take_drift(pipe: PipelineParts, tensors: Tensors) -> None:
    """Restore the state from the tensors that were read."""
    saved = _by_weight(tensors)
    for held, names in _every(pipe):
        if held.drift is not None:
            for name, mean in zip(names, held.drift.delta, strict=True):
                key = _nearest(saved, "drift", held.stage, name)
                mean.zero_() if key is None else mean.copy_(tensors[key])
            held.drift.forget()
        if held.steps is not None:
            keys = [_nearest(saved, "step", held.stage, name) for name in names]
            steps = [tensors[key].to(pipe.device) for key in keys if key is not None]
            held.steps.resume(steps if len(steps) == len(names) else None)


def _every(pipe: PipelineParts) -> Iterator[tuple[Held, list[str]]]:
    """Yield the versioned weights of each stage here, with the model's names for them."""
    if pipe.async_trainer is not None:
        names = {parameter: name for name, parameter in pipe.model.named_parameters()}
        for held in pipe.async_trainer.weights.every():
            yield held, [names[parameter] for parameter in held.versions.parameters]


def _means(held: Held) -> list[torch.Tensor]:
    return [] if held.drift is None else held.drift.delta


def _last(held: Held) -> list[torch.Tensor]:
    return [] if held.steps is None else held.steps.of(held.steps.newest) or []


def _by_weight(names: Records | Tensors) -> dict[tuple[str, str], list[int]]:
    """Return the stages that have saved state of a weight, by kind and weight."""
    stages: dict[tuple[str, str], list[int]] = {}
    for key in names:
        kind, _, rest = key.partition(".")
        stage, _, name = rest.partition(".")
        if kind in ("drift", "step") and stage.isdecimal():
            stages.setdefault((kind, name), []).append(int(stage))
    return stages


def _nearest(saved: dict[tuple[str, str], list[int]], kind: str, stage: int, name: str) -> str | None:
    stages = saved.get((kind, name))
    return f"{kind}.{min(stages, key=lambda other: (abs(other - stage), other))}.{name}" if stages else None
