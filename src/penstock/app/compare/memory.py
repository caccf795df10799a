"""What a run holds in memory, by kind, on its fullest rank.

Weights, gradients, optimizer state and weight versions are the bytes of the tensors that are there. What a stage keeps
of one micro-batch is weighed once; the schedule says how many a rank holds at most.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from penstock.app.config.task import Task
from penstock.core.cost import Footprint, flat_costs
from penstock.core.loop import Loop
from penstock.core.lower import lower
from penstock.core.lowered_loop import LoweredLoop
from penstock.core.memory import ACTIVATION_KINDS, MemoryKind, MemoryUse
from penstock.core.schedule import Schedule
from penstock.engine.measure.activation_bytes import ActivationMeter, MicroBatchBytes
from penstock.engine.weights.select import Held, VersionedWeights
from penstock.training.measurement.gather import standing
from penstock.training.pipeline import Pipeline

KINDS = ("weights", "versions", "gradients", "optimizer", "activations")
PARTS = ("activations", "until_weight", "inputs", "weights", "gradients", "optimizer", "buffers")

StageBytes = dict[int, dict[str, int]]


def micro_batch_bytes(task: Task) -> list[MicroBatchBytes]:
    """Return what each stage keeps of one micro-batch, from one step of a synchronous schedule in this process.

    Here the split model is compared with the whole one too, for all methods that have the same stages.
    """
    pipe = task.pipeline()
    meter = ActivationMeter(pipe.executor.stages, pipe.device)
    meter.step_begins(pipe.observers)
    (batch,) = task.batches(0, 1)
    pipe.step(*batch)
    return [meter.bytes[stage] for stage in sorted(meter.bytes)]


def stage_bytes(pipe: Pipeline) -> StageBytes:
    """What the stages here hold after a run: buffers of versions stay, so those are the most there were."""
    found = standing(pipe)
    trainer = pipe.async_trainer
    beside = {} if trainer is None else version_bytes(trainer.weights)
    return {at: always | {"versions": beside.get(at, 0)} for at, always in found.items()}


def version_bytes(weights: VersionedWeights) -> dict[int, int]:
    """Buffers beside the weights themselves: older versions, forecasts, PipeMare's means and corrected weights."""
    return {
        stage: sum(_sets(weights, one) * _bytes(one.versions.parameters) + _remedies(one) for one in held)
        for stage, held in weights.held.items()
    }


def _sets(weights: VersionedWeights, held: Held) -> int:
    """Buffers of versions beside the newest. Stages of one process share those of a tied weight; each in a process of
    its own would have as many as of its own weights."""
    shared = len(weights.users[held.versions]) > 1
    versions = weights.held[held.stage][0].versions if shared else held.versions
    return len(versions.data) + len(versions.spare) - 1


def _remedies(held: Held) -> int:
    drift = () if held.drift is None else (*held.drift.delta, *held.drift.spare)
    steps = () if held.steps is None else [tensor for step in held.steps.by_version.values() for tensor in step]
    return _bytes([*drift, *steps])


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def footprint(kept: list[MicroBatchBytes], stages: StageBytes) -> Footprint:
    every = [vars(kept[at]) | stages[at] for at in range(len(kept))]
    return Footprint(**{name: np.array([float(stage[name]) for stage in every]) for name in PARTS})


def fullest(
    built: Schedule | Loop, steps: int, kept: list[MicroBatchBytes], stages: StageBytes, recompute: bool
) -> dict[str, float]:
    """Bytes by kind on the rank that holds most; each kind at its own highest."""
    schedule = lower(built.unroll(min(steps, LoweredLoop(built).least + 1)) if isinstance(built, Loop) else built)
    shape = schedule.shape
    costs = replace(flat_costs(shape), footprint=footprint(kept, stages), recompute=np.full(shape.stages, recompute))
    memory = MemoryUse.predicted(schedule, costs)
    versions = np.zeros(shape.ranks)
    np.add.at(versions, shape.stage_rank, [stages[at]["versions"] for at in range(shape.stages)])
    by_rank = {
        "weights": memory.standing[MemoryKind.WEIGHTS],
        "versions": versions,
        "gradients": memory.peak(schedule, (MemoryKind.GRADIENTS,)),
        "optimizer": memory.standing[MemoryKind.OPTIMIZER],
        "activations": memory.peak(schedule, ACTIVATION_KINDS),
    }
    most = int(np.argmax(sum(by_rank.values(), np.zeros(shape.ranks))))
    return {kind: float(by_rank[kind][most]) for kind in KINDS}
