"""The kept steps of all ranks in one place: their readings on rank 0's clock, and what they weighed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.app.measured import Measured, paired
from penstock.app.offsets import offsets
from penstock.core.action import Op
from penstock.core.cost import Footprint
from penstock.core.links import FloatArray
from penstock.core.loop import Loop
from penstock.core.lower import lower
from penstock.core.schedule import Schedule
from penstock.core.timeline import Timeline
from penstock.engine.clock import Clock
from penstock.engine.inline import InlineEngine
from penstock.engine.stream import InlineStream, WorkerStream
from penstock.engine.worker import Worker
from penstock.engine.world import World
from penstock.errors import InputError
from penstock.model.heap import bytes_of
from penstock.model.stage import Recompute

if TYPE_CHECKING:
    from penstock.app.pipeline import Pipeline

Readings = npt.NDArray[np.int64]
Json = dict[str, Any]
PARTS = ("activations", "until_weight", "inputs", "weights", "gradients", "optimizer", "buffers")


def gathered(pipe: Pipeline) -> Measured:
    """What was measured on all ranks. Every rank has to ask."""
    world, clock, schedule = _world(pipe), pipe.clock, pipe.schedule
    if not isinstance(clock, Clock) or not isinstance(schedule, Schedule):
        raise InputError(
            "a synchronous schedule, whose steps are alike", repr(schedule.shape.name), "ask for pipe.timeline()"
        )
    if not clock.steps:
        raise _nothing_yet()
    ahead = offsets(world, clock.read)
    mine = np.array(clock.steps, dtype=np.int64)
    readings = [np.frombuffer(part, np.int64).reshape(len(mine), -1) for part in world.gather(mine.tobytes())]
    on_one_clock = [one - offset for one, offset in zip(readings, ahead, strict=True)]
    start, end = _rows(schedule, on_one_clock, asked=pipe.optimizers.clip is not None or pipe.optimizers.fp16)
    told = [json.loads(part) for part in world.gather(json.dumps(_weighed(pipe)).encode())]
    again = np.array([stage.recompute is not Recompute.NEVER for stage in pipe.settings])
    added = np.array([float(part["added"]) for part in told])
    return Measured(schedule, start, end, clock.first, again, _footprint(told, schedule.shape.stages), added)


def timeline_here(pipe: Pipeline) -> Timeline:
    """The last step of a pipeline whose stages all run in this process, one after the other. What goes from one to
    another takes no time, and all updates come at the end."""
    engine, clock, schedule = pipe.engine, pipe.clock, pipe.schedule
    assert isinstance(engine, InlineEngine)
    assert isinstance(schedule, Schedule)
    if not isinstance(clock, Clock):
        raise _not_kept()
    if not clock.steps:
        raise _nothing_yet()
    readings = np.array(clock.steps[-1], dtype=np.int64)
    seconds = (readings - readings[0]) * 1e-9
    start, end = seconds[engine.before], seconds[engine.after]
    updates = np.flatnonzero(schedule.rows.op == Op.UPDATE)
    edges = np.linspace(seconds[-2], seconds[-1], len(updates) + 1)
    start[updates], end[updates] = edges[:-1], edges[1:]
    return Timeline(schedule, *paired(schedule, start, end), measured=True)


def gathered_run(pipe: Pipeline) -> Timeline:
    """The last run without a flush, from its fill to its drain, as it was measured. Every rank has to ask."""
    crew, loop, engine = pipe.crew, pipe.schedule, pipe.engine
    assert isinstance(engine, (InlineStream, WorkerStream))
    assert isinstance(loop, Loop)
    if not engine.clocks:
        raise _not_kept()
    clock = engine.clocks[0]
    if clock.last is None:
        raise InputError(
            "a run that has drained, of no more mini-batches than are kept",
            "none, or a longer one",
            "train a shorter one, or evaluate in between",
        )
    if crew.alone:
        parts = [np.array(one.last[:2], dtype=np.int64) for one in engine.clocks if one.last is not None]
        ahead = [0] * len(parts)
    else:
        world = _world(pipe)
        ahead = offsets(world, clock.read)
        mine = np.array(clock.last[:2], dtype=np.int64)
        parts = [np.frombuffer(part, np.int64).reshape(2, -1) for part in world.gather(mine.tobytes())]
    on_one_clock = np.concatenate([one - offset for one, offset in zip(parts, ahead, strict=True)], axis=1)
    start, end = (on_one_clock - on_one_clock.min()) * 1e-9
    return Timeline(lower(loop.unroll(clock.last[2])), start, end, measured=True)


def _nothing_yet() -> InputError:
    return InputError("at least one step to have been measured", "none", "train first")


def _not_kept() -> InputError:
    return InputError("a pipeline whose timeline is kept", "timeline=False", "leave timeline on")


def _world(pipe: Pipeline) -> World:
    if pipe.clock is None or not isinstance(pipe.crew.world, World):
        raise InputError(
            "a run on several processes whose timeline is kept",
            "one process, or timeline=False",
            "launch with torchrun, and leave timeline on; pipe.timeline() serves in one process, too",
        )
    return pipe.crew.world


def _rows(schedule: Schedule, readings: list[Readings], asked: bool) -> tuple[FloatArray, FloatArray]:
    """Start and end of every row, in seconds. The updates of a rank share what its readings say of them all.

    `asked`: whether ranks ask each other during the update too, so that they may meet in the midst of it.
    """
    first = min(int(one.min()) for one in readings)  # taken off while whole: floats of today's clocks would round
    ranks = [(one - first) * 1e-9 for one in readings]
    met = np.max([one[:, -3] for one in ranks], axis=0)
    start, end = (np.zeros((len(met), len(schedule))) for _ in range(2))
    for slot, one in enumerate(ranks):
        rows = np.arange(schedule.starts[slot], schedule.starts[slot + 1])
        op = schedule.rows.op[rows]
        ran, update = op <= Op.RECV_B, op == Op.UPDATE
        last = np.cumsum(ran)  # the reading before a row; one that nobody runs has no length
        start[:, rows], end[:, rows] = one[:, np.where(ran, last - 1, last)], one[:, last]
        begun = np.clip(met, one[:, -3], one[:, -1 if asked else -2])
        edges = np.linspace(begun, one[:, -1], int(update.sum()) + 1, axis=1)
        start[:, rows[update]], end[:, rows[update]] = edges[:, :-1], edges[:, 1:]
    return start, end


def standing(pipe: Pipeline) -> dict[int, dict[str, int]]:
    """Bytes of what each stage here has all the time: weights and buffers, gradients, and its optimizer's state."""
    homes, found = pipe.split.buffer_stages(), {}
    for stage in pipe.stages:
        at = stage.index
        buffers = [b for name, b in pipe.model.named_buffers() if homes.get(name, 0) == at]
        optimizer = pipe.optimizers.optimizers.get(at)
        state = [] if optimizer is None else [v for one in optimizer.state.values() for v in one.values()]
        found[at] = {
            "weights": bytes_of(stage.parameters),
            "buffers": bytes_of(buffers),
            "gradients": bytes_of([p for p in stage.parameters if p.requires_grad]),
            "optimizer": bytes_of(state),
        }
    return found


def _weighed(pipe: Pipeline) -> Json:
    """Bytes of this rank's stages, and those that training took in all."""
    assert isinstance(pipe.engine, Worker)
    assert pipe.engine.weigh is not None
    weigh = pipe.engine.weigh
    found = {at: vars(weigh.kept[at]) | always for at, always in standing(pipe).items()}
    return {"stages": found, "added": weigh.mark.added()}


def _footprint(told: list[Json], stages: int) -> Footprint:
    every = {int(at): kept for part in told for at, kept in part["stages"].items()}
    return Footprint(**{name: np.array([float(every[at][name]) for at in range(stages)]) for name in PARTS})
