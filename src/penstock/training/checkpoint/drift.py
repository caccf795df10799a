"""How the weights have moved, in a checkpoint: what remedies against stale weights know of the versions before.

    drift.<stage>.<name>      PipeMare's running mean of a weight's steps, as that stage has it
    step.<stage>.<name>       the last step, from which forecasts are made

Stages have their own means, of tied weights too. Where the stages are others than those that saved, a weight takes what
some stage has saved of it; where nobody has, it begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from penstock.engine.weights.select import Held
from penstock.training.checkpoint.files import Records
from penstock.training.pipeline_parts import PipelineParts

Tensors = dict[str, torch.Tensor]


def drift_of(pipe: PipelineParts) -> Tensors:
    """What this rank has to write."""
    found: Tensors = {}
    for held, names in _every(pipe):
        for kind, kept in (("drift", _means(held)), ("step", _last(held))):
            found |= {f"{kind}.{held.stage}.{name}": tensor for name, tensor in zip(names, kept, strict=False)}
    return found


def wanted_drift(pipe: PipelineParts, records: Records) -> Records:
    """What this rank has to read."""
    known = _by_weight(records)
    found = {}
    for held, names in _every(pipe):
        kinds = [kind for kind, mine in (("drift", held.drift), ("step", held.steps)) if mine is not None]
        for told in (_nearest(known, kind, held.stage, name) for kind in kinds for name in names):
            if told is not None:
                found[told] = records[told]
    return found


def take_drift(pipe: PipelineParts, tensors: Tensors) -> None:
    """Go on from what was read."""
    known = _by_weight(tensors)
    for held, names in _every(pipe):
        if held.drift is not None:
            for name, mean in zip(names, held.drift.delta, strict=True):
                told = _nearest(known, "drift", held.stage, name)
                mean.zero_() if told is None else mean.copy_(tensors[told])
            held.drift.forget()
        if held.steps is not None:
            every = [_nearest(known, "step", held.stage, name) for name in names]
            steps = [tensors[told].to(pipe.device) for told in every if told is not None]
            held.steps.resume(steps if len(steps) == len(names) else None)


def _every(pipe: PipelineParts) -> Iterator[tuple[Held, list[str]]]:
    """Weights that are watched, with the model's names for them."""
    if pipe.async_trainer is not None:
        names = {parameter: name for name, parameter in pipe.model.named_parameters()}
        for held in pipe.async_trainer.weights.every():
            yield held, [names[parameter] for parameter in held.versions.parameters]


def _means(held: Held) -> list[torch.Tensor]:
    return [] if held.drift is None else held.drift.delta


def _last(held: Held) -> list[torch.Tensor]:
    return [] if held.steps is None else held.steps.of(held.steps.newest) or []


def _by_weight(names: Records | Tensors) -> dict[tuple[str, str], list[int]]:
    """The stages that have saved something of a weight."""
    found: dict[tuple[str, str], list[int]] = {}
    for told in names:
        kind, _, rest = told.partition(".")
        stage, _, name = rest.partition(".")
        if kind in ("drift", "step") and stage.isdecimal():
            found.setdefault((kind, name), []).append(int(stage))
    return found


def _nearest(known: dict[tuple[str, str], list[int]], kind: str, stage: int, name: str) -> str | None:
    stages = known.get((kind, name))
    return f"{kind}.{min(stages, key=lambda other: (abs(other - stage), other))}.{name}" if stages else None
