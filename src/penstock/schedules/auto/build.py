"""`auto`: a synchronous schedule for the costs and the memory at hand, found by search (after Qi et al. 2023).

Without a number of chunks, it is the best of one chunk a rank, two placed as a V, and two interleaved.
Every backward is split into input gradient I and weight gradient W. The result is never slower than the named methods
of the same placement that fit the same memory, because they are among the candidates (run without overlapping F and B:
where costs say that F&B takes less than F + B, `dualpipe-v` with overlap may be faster).

    p = 2, m = 3, equal costs, memory 2         0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
                                                1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from penstock.core.cost import Costs, flat_costs
from penstock.core.schedule import Schedule
from penstock.core.shape import Shape
from penstock.errors import InputError
from penstock.schedules.auto.bound import bound
from penstock.schedules.auto.clock import clock, peak
from penstock.schedules.auto.instance import Instance, Order, make_instance
from penstock.schedules.auto.named import named_orders, one_at_a_time, schedule_of
from penstock.schedules.auto.search import ROUNDING, default_effort, search
from penstock.schedules.request import ScheduleRequest

MOST = 1_000_000  # forwards and backwards of a mini-batch: searched in minutes; more take hours
NUMBERS = ("forward", "input_grad", "weight_grad", "transfer", "weight_grad_memory")
OPTIONS = {
    "forward": "seconds of a forward: one number, or one a rank (each chunk takes an equal part)",
    "input_grad": "seconds of an input gradient, likewise",
    "weight_grad": "seconds of a weight gradient, likewise",
    "transfer": "seconds of a transfer: one number, or one a boundary",
    "weight_grad_memory": "the part of a micro-batch's activations that must stay until its weight gradient (0.5)",
    "memory": "most activations on a rank, in those of one micro-batch: one number, or one a rank (no limit)",
    "costs": "ready costs instead of the numbers; memory is then in their bytes",
    "placement": "'straight' (one chunk), 'v' (two) or 'interleaved'; the best is chosen where chunks are not given",
    "seed": "of the search (0): the same seed gives the same schedule",
    "effort": "how many orders to try beside the named ones (by size, at most 4000)",
}


def auto(request: ScheduleRequest) -> Schedule:
    """Return the best schedule found for one mini-batch, repeated for all of them.

    The placement is searched too where nothing fixes it: no chunks, placement, edges or ready costs.
    """
    _require_few(request)
    fixed = {"placement", "costs"} & set(request.options)
    if not request.any_chunks or fixed or request.edges or request.stages == 1:
        return schedule_of(*_searched(request, _placement(request))[1:])
    return schedule_of(*_best(request))


def _require_few(request: ScheduleRequest) -> None:
    actions = 2 * request.stages * request.chunks * request.microbatches
    if actions > MOST:
        do = "ask for fewer micro-batches, or name another method, such as zb-v"
        raise InputError(f"at most {MOST:,} forwards and backwards for auto to search", f"{actions:,}", do)


def _best(request: ScheduleRequest) -> tuple[Shape, Order]:
    """Return the fastest of one chunk a rank, two as a V, and two interleaved; of equally fast ones the first."""
    seconds, shape, order = _searched(request, "straight")
    for placement in ("v", "interleaved"):
        try:
            other = _searched(replace(request, chunks=2), placement, seconds)
        except InputError:  # seconds of the boundaries between ranks do not say what closing the ring takes
            continue
        if other[0] < seconds * (1 - ROUNDING):
            seconds, shape, order = other
    return shape, order


def _searched(request: ScheduleRequest, placement: str, beat: float = math.inf) -> tuple[float, Shape, Order]:
    """Return seconds, shape and order of the best of one placement; not searched where nothing can be below `beat`."""
    shape = {"straight": request.straight, "v": request.folded, "interleaved": request.looped}[placement]()
    costs = _costs(shape, request.options)
    instance = make_instance(shape, costs, _memory(shape, request.options.get("memory")))
    smallest = one_at_a_time(instance)
    _require_memory(instance, [peak(instance, codes) for codes in smallest])
    effort = _whole(request.options, "effort", default_effort(instance), 0)
    seed = _whole(request.options, "seed", 0)
    if bound(instance) >= beat:
        return math.inf, shape, smallest
    candidates = chain(named_orders(request, placement), [smallest])
    order = search(instance, candidates, effort, seed)
    return clock(instance, order)[0], shape, order


def _placement(request: ScheduleRequest) -> str:
    usual = {1: "straight", 2: "v"}.get(request.chunks, "interleaved")
    placement = request.options.get("placement", usual)
    allowed = {1: ("straight", "interleaved"), 2: ("v", "interleaved")}.get(request.chunks, ("interleaved",))
    if placement not in allowed:
        raise InputError(
            f"auto's placement for {request.chunks} chunk(s) a rank to be {' or '.join(map(repr, allowed))}",
            repr(placement),
            "change placement or chunks ('straight' takes 1 chunk, 'v' 2, 'interleaved' any number)",
        )
    return "straight" if request.chunks == 1 else str(placement)


def _costs(shape: Shape, options: dict[str, Any]) -> Costs:
    numbers = {name: options[name] for name in NUMBERS if name in options}
    costs = options.get("costs")
    if costs is None:
        return flat_costs(shape, **numbers)
    if numbers:
        raise InputError("costs, or numbers, but not both", f"costs and {', '.join(numbers)}", "leave one of them out")
    if not isinstance(costs, Costs) or len(costs.forward) != shape.stages or len(costs.slowdown) != shape.slots:
        came = f"costs of {len(costs.forward)} stages" if isinstance(costs, Costs) else repr(costs)
        raise InputError(f"costs of {shape.stages} stages on {shape.slots} slots", came, "make them for this shape")
    if costs.offloads.any():
        raise InputError("costs without offload for auto", "stages that offload", "name a schedule, or do not offload")
    return costs


def _memory(shape: Shape, memory: float | Sequence[float] | None) -> list[float]:
    """Return the cap of every rank; None is no limit."""
    values = np.atleast_1d(np.asarray(math.inf if memory is None else memory, dtype=np.float64))
    if values.shape not in ((1,), (shape.ranks,)):
        raise InputError(
            f"memory to be one number or one for each of {shape.ranks} ranks", values.tolist(), "give either"
        )
    if not (values > 0).all():
        raise InputError("memory to be above 0", values.tolist(), "correct memory, or leave it out for no limit")
    return [float(value) for value in np.broadcast_to(values, (shape.ranks,))]


def _require_memory(instance: Instance, least: list[float]) -> None:
    """Refuse a cap below what one micro-batch at a time needs, the least of any order."""
    infeasible = [rank for rank in range(instance.ranks) if least[rank] > instance.cap[rank]]
    if infeasible:
        rank = infeasible[0]
        raise InputError(
            f"memory of at least {least[rank]:g} on rank {rank}, which one micro-batch needs there",
            f"{instance.cap[rank]:g}",
            f"raise memory to {max(least[rank] for rank in infeasible):g} or more, or use smaller micro-batches or "
            "more stages",
        )


def _whole(options: dict[str, Any], name: str, usual: int, least: int | None = None) -> int:
    value = options.get(name, usual)
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        rule = "a whole number" if least is None else f"a whole number of at least {least}"
        raise InputError(f"auto's {name} to be {rule}", repr(value), f"change {name}")
    return value
