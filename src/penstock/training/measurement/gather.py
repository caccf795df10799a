"""Gather the kept steps of all ranks: their times on rank 0's clock, and their bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from penstock.comm.world.world import World
from penstock.core.action import Op
from penstock.core.cost import Footprint, shares
from penstock.core.links import FloatArray
from penstock.core.loop import Loop
from penstock.core.lower import lower
from penstock.core.schedule import Schedule
from penstock.core.shape import Shape
from penstock.core.timeline import Timeline
from penstock.engine.measure.clock import Clock, Readings
from penstock.errors import InputError
from penstock.model.heap import bytes_of
from penstock.model.stage import Recompute, Stage
from penstock.training.measurement.clock_offsets import offsets
from penstock.training.measurement.measured import Measured, paired
from penstock.training.pipeline_parts import PipelineParts
from penstock.training.sharded_state import Shard

Json = dict[str, Any]
BY_ROWS = ("activations", "until_weight", "inputs")  # of a micro-batch's rows, which replicas divide
PARTS = (*BY_ROWS, "weights", "gradients", "optimizer", "buffers")


def gathered(pipe: PipelineParts) -> Measured:
    """Return the measurements of all ranks. Every rank has to call."""
    world, clock, schedule = _world(pipe), pipe.clock, pipe.schedule
    if clock is None or not isinstance(schedule, Schedule):
        raise InputError(
            "a synchronous schedule, whose steps are alike", repr(schedule.shape.name), "ask for pipe.timeline()"
        )
    if not clock.runs:
        raise _nothing_yet()
    steps = np.stack([run.readings for run in clock.runs])
    order = pipe.ranks.of_slots(schedule.shape)
    start, end = _seconds(_gathered_readings(world, clock, steps, order), schedule)
    every = world.gather(json.dumps(_measured_bytes(pipe)).encode())
    facts = [json.loads(every[process]) for process in order]
    again = np.array([stage.recompute is not Recompute.NEVER for stage in pipe.settings])
    added = np.array([float(part["added"]) for part in facts])
    return Measured(schedule, start, end, clock.first, again, _footprint(facts, schedule.shape), added)


def timeline_here(pipe: PipelineParts) -> Timeline:
    """Return the last step of a pipeline whose stages all run in this process, one after the other. What goes from one
    to another takes no time."""
    clock, schedule = pipe.clock, pipe.schedule
    assert isinstance(schedule, Schedule)
    if clock is None:
        raise _not_kept()
    if not clock.runs:
        raise _nothing_yet()
    start, end = _since_first(clock.runs[-1].readings)
    return Timeline(schedule, *paired(schedule, start, end), measured=True)


def gathered_run(pipe: PipelineParts) -> Timeline:
    """Return the last run of asynchronous training, from its fill to its drain, as it was measured. Every rank has to
    call."""
    loop, clock = pipe.schedule, pipe.clock
    assert isinstance(loop, Loop)
    if clock is None:
        raise _not_kept()
    if not clock.runs:
        raise InputError(
            "a run that has drained, of no more mini-batches than are kept",
            "none, or a longer one",
            "train a shorter one, or evaluate in between",
        )
    run = clock.runs[-1]
    readings = run.readings
    if not pipe.ranks.alone:
        order = pipe.ranks.of_slots(loop.shape)
        readings = np.concatenate(_gathered_readings(_world(pipe), clock, readings, order), axis=-1)
    start, end = _since_first(readings)
    return Timeline(lower(loop.unroll(run.batches)), start, end, measured=True)


def _gathered_readings(world: World, clock: Clock, readings: Readings, order: list[int]) -> list[Readings]:
    """Return the readings of all slots, on rank 0's clock. `order`: the process of every slot."""
    ahead = offsets(world, clock.read)
    parts = world.gather(np.ascontiguousarray(readings).tobytes())
    shape = (*readings.shape[:-1], -1)
    return [np.frombuffer(parts[rank], np.int64).reshape(shape) - ahead[rank] for rank in order]


def _since_first(readings: Readings) -> tuple[FloatArray, FloatArray]:
    """Return begins and ends in seconds since the first begin."""
    start, end = (readings - readings.min()) * 1e-9  # subtracted as integers, as floats of such clocks would round
    return start, end


def _nothing_yet() -> InputError:
    return InputError("at least one step to have been measured", "none", "train first")


def _not_kept() -> InputError:
    return InputError("a pipeline whose timeline is kept", "timeline=False", "leave timeline on")


def _world(pipe: PipelineParts) -> World:
    if pipe.clock is None or not isinstance(pipe.ranks.world, World):
        raise InputError(
            "a run on several processes whose timeline is kept",
            "one process, or timeline=False",
            "launch with torchrun, and leave timeline on; pipe.timeline() serves in one process, too",
        )
    return pipe.ranks.world


def _seconds(ranks: list[Readings], schedule: Schedule) -> tuple[FloatArray, FloatArray]:
    """Return start and end of every row of some steps, in seconds: (steps, rows). Before the updates all ranks agree on
    them: the first update of a rank begins when the last rank has come to that, with all reductions."""
    readings = np.concatenate(ranks, axis=-1)
    start, end = np.moveaxis((readings - readings.min()) * 1e-9, 1, 0)
    update = schedule.rows.op == Op.UPDATE
    first = [int(begin) + int(np.argmax(update[begin:])) for begin in schedule.starts[:-1]]
    _begin_reductions_together(schedule, start, end)
    own = [end[:, begin:row].max(axis=1) for begin, row in zip(schedule.starts.tolist(), first, strict=False)]
    met = np.max(own, axis=0)
    for row, done in zip(first, own, strict=True):
        start[:, row] = np.clip(met, done, start[:, row])
    return start, end


def _begin_reductions_together(schedule: Schedule, start: FloatArray, end: FloatArray) -> None:
    """Begin each reduction when the last replica has come to it, and each slot has ended the one before."""
    rows = np.flatnonzero(schedule.rows.op == Op.REDUCE)
    stages, slots = schedule.rows.stage[rows], schedule.slot_of_rows()[rows]
    free = np.zeros((len(start), schedule.shape.slots))
    for stage in dict.fromkeys(stages.tolist()):  # those of one slot in the order of its rows
        members, own = rows[stages == stage], slots[stages == stage]
        begun = np.maximum(start[:, members], free[:, own]).max(axis=1, keepdims=True)
        start[:, members] = np.minimum(begun, end[:, members])
        free[:, own] = end[:, members]


def standing(pipe: PipelineParts) -> dict[int, dict[str, int]]:
    """Return the bytes that each stage here has all the time: weights, buffers, gradients and optimizer state."""
    homes, by_stage = pipe.split.buffer_stages(), {}
    for stage in pipe.stages:
        at = stage.index
        buffers = [b for name, b in pipe.model.named_buffers() if homes.get(name, 0) == at]
        optimizer = pipe.optimizers.optimizers.get(at)
        state = [] if optimizer is None else [v for one in optimizer.state.values() for v in one.values()]
        by_stage[at] = {
            "weights": bytes_of(stage.parameters),
            "buffers": bytes_of(buffers),
            "gradients": _gradient_bytes(pipe, stage),
            "optimizer": bytes_of(state),
        }
    return by_stage


def _gradient_bytes(pipe: PipelineParts, stage: Stage) -> int:
    """Return the bytes of a stage's summed gradients; where replicas divide them, those of this replica's rows."""
    trained, sharded = [p for p in stage.parameters if p.requires_grad], pipe.optimizers.sharded
    if sharded is None or sharded.level is Shard.OPTIMIZER:
        return bytes_of(trained)
    return sum(p.numel() * p.element_size() for p in (sharded.shards.get(p, p) for p in trained))


def _measured_bytes(pipe: PipelineParts) -> Json:
    """Return the bytes of this rank's stages, and those that training took in all."""
    assert pipe.engine is not None
    assert pipe.engine.meter is not None
    meter = pipe.engine.meter
    stages = {at: vars(meter.bytes[at]) | always for at, always in standing(pipe).items()}
    return {"stages": stages, "added": meter.peak.added()}


def _footprint(facts: list[Json], shape: Shape) -> Footprint:
    """Return the bytes of every stage: of its replicas the most, and of what they keep of a micro-batch's rows as much
    as all rows would take."""
    most = {name: np.zeros(shape.stages) for name in PARTS}
    for part in facts:
        for stage, kept in part["stages"].items():
            for name in PARTS:
                most[name][int(stage)] = max(most[name][int(stage)], kept[name])
    share = shares(shape)
    return Footprint(**{name: most[name] / share if name in BY_ROWS else most[name] for name in PARTS})
