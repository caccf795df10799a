"""Timelines to draw: small ones of every sort that a writer must be able to draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from penstock.core.action import Action
from penstock.core.cost import Footprint, flat_costs
from penstock.core.schedule import Schedule
from penstock.core.shape import Law, Shape
from penstock.core.timeline import Timeline
from penstock.schedules.registry import schedule
from penstock.simulator.simulate import simulate, simulate_costs

HOSTILE = "</script><script>alert(1)</script> \"&' <b> {{data}} ]]> [red]"


def predicted(name: str, stages: int, microbatches: int | None, built: dict[str, Any], **costs: Any) -> Timeline:
    return simulate(schedule(name, stages=stages, microbatches=microbatches, **built), **costs)


def plain() -> Timeline:
    """1f1b on 4 ranks, 8 micro-batches, with transfers and updates that take time."""
    return predicted("1f1b", 4, 8, {}, transfer=0.3, update=0.5)


def empty() -> Timeline:
    shape = Shape("empty", Law.SYNC, (0, 1), 1)
    nothing = np.zeros(0)
    return Timeline(Schedule.of_slots(shape, [[], []], lowered=True), nothing, nothing)


def measured(offset: float = 100.0) -> Timeline:
    """As an engine would hand it over: no costs, no memory, a clock that starts anywhere, times that scatter."""
    line = plain()
    scatter = np.random.default_rng(1).uniform(0, 0.01, len(line.start))
    return Timeline(line.schedule, line.start + offset + scatter, line.end + offset + scatter, measured=True)


def in_bytes() -> Timeline:
    """Weights, gradients, optimizer state and recomputation, in bytes."""
    built = schedule("1f1b", stages=2, microbatches=4)
    some = np.full(2, 2.0**20)
    foot = Footprint(8 * some, 4 * some, some, 3 * some, 3 * some, 6 * some)
    return simulate_costs(built, replace(flat_costs(built.shape, recompute=True, recompute_memory=0.1), footprint=foot))


def hostile() -> Timeline:
    line = predicted("gpipe", 2, 2, {})
    built = replace(line.schedule, shape=replace(line.schedule.shape, name=HOSTILE))
    return replace(line, schedule=built)


def hand_made(words: list[str], times: list[tuple[float, float]]) -> Timeline:
    """One rank's words with the times given."""
    shape = Shape("by hand", Law.SYNC, (0,), 4)
    built = Schedule.of_slots(shape, [[Action.parse(word) for word in words]], lowered=True)
    return Timeline(built, np.array([t[0] for t in times]), np.array([t[1] for t in times]))


CASES = {
    "plain": plain,
    "empty": empty,
    "measured": measured,
    "in bytes": in_bytes,
    "hostile": hostile,
    "one stage": lambda: predicted("1f1b", 1, 3, {}),
    "no time at all": lambda: predicted("1f1b", 2, 2, {}, forward=0, input_grad=0, weight_grad=0),
    "weight gradients apart": lambda: predicted("zb-h1", 3, 5, {}, transfer=0.1),
    "replicas that split": lambda: predicted("1f1b", 2, 4, {"replicas": (2, 1)}, transfer=0.1, reduce=0.4, update=0.1),
    "replicas in turns": lambda: predicted("pipedream", 2, 1, {"replicas": (3, 1), "batches": 9}, reduce=0.5),
    "two chunks": lambda: predicted("interleaved", 2, 4, {"chunks": 2}, transfer=0.05),
    "overlapped pairs": lambda: predicted("dualpipe-v", 2, 6, {"overlap": True}, transfer=0.1),
    "versions": lambda: predicted("2bw", 3, 3, {"batches": 4}),
    "milliseconds": lambda: predicted("gpipe", 2, 3, {}, forward=0.001, input_grad=0.001, weight_grad=0.001),
}
