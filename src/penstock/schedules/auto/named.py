"""The named methods of a placement as candidate orders, and an order back as a schedule.

A full backward becomes an input gradient directly followed by its weight gradient: the same time on its rank, and the
gradient leaves for the rank before no later. So no candidate is slower here than under its own name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from penstock.core.action import Op
from penstock.core.schedule import Schedule
from penstock.core.shape import Shape
from penstock.schedules.auto.instance import Instance, Order
from penstock.schedules.chunked import dualpipe_v, interleaved, zb_v
from penstock.schedules.program import Program, flush
from penstock.schedules.request import ScheduleRequest
from penstock.schedules.straight import dapple, gpipe, zb_h1, zb_h2


def named_orders(request: ScheduleRequest, placement: str) -> Iterator[Order]:
    """Yield every named method of the placement that takes this many micro-batches, for one mini-batch."""
    plain = replace(request, batches=1, replicas=(), edges=(), options={})
    p, m = request.stages, request.microbatches
    if placement == "straight":
        for build in (gpipe, zb_h1, zb_h2):
            yield order_of(build(plain))
        for policy, deepest in (("pa", p), ("pb", 2 * p - 1)):  # pa at its deepest is 1f1b
            for cap in range(min(deepest, m), 1, -max(1, deepest // 16)):
                yield order_of(dapple(replace(plain, options={"policy": policy, "cap": cap})))
    elif placement == "v":
        yield order_of(zb_v(plain))
        if m >= 2 * p:
            yield order_of(dualpipe_v(plain))
    elif m % p == 0:
        yield order_of(interleaved(plain))


def one_at_a_time(instance: Instance) -> Order:
    """Return the order in which each micro-batch goes through all stages and back before the next one starts: no order
    needs less memory."""
    order: Order = []
    for owned in instance.owned:
        there = list(owned)
        back = [code for s in reversed(owned) for code in (instance.stages + s, 2 * instance.stages + s)]
        order.append((there + back) * instance.microbatches)
    return order


def order_of(schedule: Schedule) -> Order:
    """Return the order of a schedule of one mini-batch."""
    stages = schedule.shape.stages
    first = {Op.F: 0, Op.FB: 0, Op.B: stages, Op.I: stages, Op.W: 2 * stages}
    order: Order = []
    for start, stop in zip(schedule.starts[:-1].tolist(), schedule.starts[1:].tolist(), strict=True):
        codes: list[int] = []
        ops, owned = schedule.rows.op[start:stop].tolist(), schedule.rows.stage[start:stop].tolist()
        for op, stage in zip(ops, owned, strict=True):
            codes.append(first[Op(op)] + stage)
            if op == Op.B:
                codes.append(2 * stages + stage)
        order.append(codes)
    return order


def schedule_of(shape: Shape, order: Order) -> Schedule:
    """Return the schedule of an order: the n-th time a code appears it means micro-batch n."""
    ops = np.array([Op.F, Op.I, Op.W], dtype=np.uint8)
    programs = []
    for codes in order:
        code = np.array(codes, dtype=np.int32)
        number = np.zeros(len(code), dtype=np.int32)
        for kind in np.unique(code):
            here = code == kind
            number[here] = np.arange(int(here.sum()), dtype=np.int32)
        programs.append(Program(ops[code // shape.stages], code % shape.stages, number))
    return flush(shape, programs)
