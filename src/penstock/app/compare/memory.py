"""The memory of a run, by kind, on the rank that needs most.

Weights, gradients, optimizer state and weight versions are counted as the bytes of existing tensors. The activations of
one micro-batch are measured once for each stage; the schedule says how many a rank holds at most.
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
    """Return the bytes that each stage keeps of one micro-batch, from one step of a synchronous schedule in this
    process.

    This step also compares the split model with the whole one, for all methods with the same stages.
    """
    pipe = task.pipeline()
    meter = ActivationMeter(pipe.executor.stages, pipe.device)
    meter.step_begins(pipe.observers)
    (batch,) = task.batches(0, 1)
    pipe.step(*batch)
    return [meter.bytes[stage] for stage in sorted(meter.bytes)]


def stage_bytes(pipe: Pipeline) -> StageBytes:
    """Return the bytes by kind of this process's stages after a run. Version buffers are kept, so theirs are the
    peak."""
    bytes_by_stage = standing(pipe)
    trainer = pipe.async_trainer
    versions = {} if trainer is None else version_bytes(trainer.weights)
    return {at: kinds | {"versions": versions.get(at, 0)} for at, kinds in bytes_by_stage.items()}


def version_bytes(weights: VersionedWeights) -> dict[int, int]:
    """Return the bytes of buffers beside the weights: older versions, forecasts, PipeMare's means and corrected
    weights."""
    return {
        stage: sum(_sets(weights, one) * _bytes(one.versions.parameters) + _mitigation_bytes(one) for one in held)
        for stage, held in weights.held.items()
    }


def _sets(weights: VersionedWeights, held: Held) -> int:
    """Return how many versions there are beside the newest. In one process, stages share the versions of a tied weight;
    in separate processes, each would have as many as of its own weights."""
    shared = len(weights.users[held.versions]) > 1
    versions = weights.held[held.stage][0].versions if shared else held.versions
    return len(versions.data) + len(versions.spare) - 1


def _mitigation_bytes(held: Held) -> int:
    drift = () if held.drift is None else (*held.drift.delta, *held.drift.spare)
    steps = () if held.steps is None else [tensor for step in held.steps.by_version.values() for tensor in step]
    return _bytes([*drift, *steps])


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def footprint(kept: list[MicroBatchBytes], stages: StageBytes) -> Footprint:
    every = [vars(kept[at]) | stages[at] for at in range(len(kept))]
    return Footprint(**{name: np.array([float(stage[name]) for stage in every]) for name in PARTS})


def peak_rank_memory(
    built: Schedule | Loop, steps: int, kept: list[MicroBatchBytes], stages: StageBytes, recompute: bool
) -> dict[str, float]:
    """Return the bytes by kind on the rank that needs most, each kind at its own peak."""
    schedule = lower(built.unroll(min(steps, LoweredLoop(built).least + 1)) if isinstance(built, Loop) else built)
    shape = schedule.shape
    costs = replace(flat_costs(shape), footprint=footprint(kept, stages), recompute=np.full(shape.stages, recompute))
    memory = MemoryUse.predicted(schedule, costs)
    versions = np.zeros(shape.ranks)
    np.add.at(versions, shape.stage_rank, [stages[at]["versions"] for at in range(shape.stages)])
    by_slot = {
        "weights": memory.standing[MemoryKind.WEIGHTS],
        "versions": versions[shape.slot_rank],
        "gradients": memory.peak(schedule, (MemoryKind.GRADIENTS,)),
        "optimizer": memory.standing[MemoryKind.OPTIMIZER],
        "activations": memory.peak(schedule, ACTIVATION_KINDS),
    }
    most = int(np.argmax(sum(by_slot.values(), np.zeros(shape.slots))))
    return {kind: float(by_slot[kind][most]) for kind in KINDS}
