"""The search's own clock, memory and bound: equal to the simulator's on random orders, to the last bit."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from penstock.core.action import Action, Op
from penstock.core.cost import flat_costs
from penstock.core.schedule import Schedule
from penstock.core.shape import Law, Shape
from penstock.schedules.auto.bound import lower_bound
from penstock.schedules.auto.clock import clock, fits, peak
from penstock.schedules.auto.instance import make_instance
from penstock.schedules.auto.named import order_of, schedule_of
from penstock.schedules.registry import schedule
from penstock.simulator.simulate import simulate_costs


def random_shape(random):
    p, m = random.randint(1, 5), random.randint(1, 6)
    placement = random.choice((range(p), (*range(p), *reversed(range(p))), (*range(p), *range(p), *range(p))))
    stages = len(placement)
    chain = [(s, s + 1) for s in range(stages - 1)]
    skips = [(a, b) for a in range(stages) for b in range(a + 2, stages) if random.random() < 0.1]
    return Shape("random", Law.SYNC, tuple(placement), m, edges=tuple(chain + skips))


def random_costs(random, shape):
    numbers = {name: [random.uniform(0, 2) for _ in range(shape.ranks)] for name in ("forward", "input_grad")}
    costs = flat_costs(
        shape,
        **numbers,
        weight_grad=random.uniform(0, 2),
        transfer=[random.choice((0.0, random.uniform(0, 2))) for _ in range(shape.ranks)],
        recompute=random.random() < 0.3,
        recompute_memory=0.25,
        weight_grad_memory=random.random(),
    )
    late = np.array([[random.choice((0.0, random.random())) for _ in lane] for lane in costs.links.latency])
    slow = np.array([random.uniform(1, 2) for _ in costs.slowdown])
    return replace(costs, links=replace(costs.links, latency=late), slowdown=slow)


def random_schedule(random, shape):
    """Actions drawn one by one from those whose inputs are there: every order that can end may come up."""
    slots = [[] for _ in range(shape.ranks)]
    done = {(op, s): 0 for op in "FIW" for s in range(shape.stages)}

    def may(op, s):
        k = done[op, s]
        if k == shape.microbatches:
            return False
        if op == "F":
            return all(done["F", a] > k for a, b in shape.edges if b == s)
        if op == "I":
            return done["F", s] > k and all(done["I", b] > k for a, b in shape.edges if a == s)
        return done["I", s] > k

    for _ in range(3 * shape.stages * shape.microbatches):
        op, s = random.choice([key for key in done if may(*key)])
        slots[shape.placement[s]].append(Action(Op[op], s, done[op, s]))
        done[op, s] += 1
    return Schedule.of_slots(shape, slots)


@pytest.mark.parametrize("seed", range(150))
def test_clock_and_memory_equal_the_simulators(seed):
    random = Random(seed)
    shape = random_shape(random)
    costs, built = random_costs(random, shape), random_schedule(random, shape)
    line = simulate_costs(built, costs)
    instance = make_instance(shape, costs, [math.inf] * shape.ranks)
    order = order_of(built)
    span, ends = clock(instance, order)
    compute = line.schedule.is_compute()
    assert [end for mine in ends for end in mine] == line.end[compute].tolist()
    assert span == line.end.max()
    peaks = [peak(instance, codes) for codes in order]
    assert np.allclose(peaks, line.peak_activations, rtol=1e-12)
    assert all(fits(instance, rank, codes) for rank, codes in enumerate(order))
    assert schedule_of(shape, order) == built
    assert lower_bound(shape, costs, peaks) <= span * (1 + 1e-9)


def test_updates_count():
    shape = schedule("1f1b", stages=3, microbatches=4).shape
    costs = flat_costs(shape, update=[0.5, 1.0, 2.0])
    built = schedule("zb-h1", stages=3, microbatches=4)
    instance = make_instance(shape, costs, [math.inf] * 3)
    assert clock(instance, order_of(built))[0] == simulate_costs(built, costs).makespan


def test_an_order_that_never_ends():
    """Rank 0 wants its gradient before it has sent the forward that makes it."""
    shape = schedule("1f1b", stages=2, microbatches=2).shape
    instance = make_instance(shape, flat_costs(shape), [math.inf] * 2)
    f0, f1, i0, i1, w0, w1 = range(6)
    assert clock(instance, [[f0, i0, f0, i0, w0, w0], [f1, f1, i1, i1, w1, w1]])[0] == math.inf
    assert clock(instance, [[f0, f0, i0, i0, w0, w0], [f1, f1, i1, i1, w1, w1]])[0] < math.inf


def test_fits_sees_order_and_memory():
    shape = schedule("1f1b", stages=1, microbatches=2).shape
    for cap, codes, good in (
        (2.0, [0, 0, 1, 1, 2, 2], True),
        (1.9, [0, 0, 1, 1, 2, 2], False),  # two at once
        (1.4, [0, 1, 0, 1, 2, 2], False),  # half of the first still waits for its weight gradient
        (1.5, [0, 1, 0, 1, 2, 2], True),
        (9.0, [0, 2, 1, 0, 1, 2], False),  # weight gradient before its input gradient
    ):
        assert fits(make_instance(shape, flat_costs(shape), [cap]), 0, codes) is good


def test_a_full_backward_is_never_slower_in_two_parts():
    for name in ("gpipe", "1f1b", "dapple", "naive"):
        built = schedule(name, stages=4, microbatches=6)
        costs = flat_costs(built.shape, forward=[1, 2, 1, 3], transfer=0.5)
        instance = make_instance(built.shape, costs, [math.inf] * 4)
        assert clock(instance, order_of(built))[0] <= simulate_costs(built, costs).makespan


def test_bound_by_hand():
    """p = 2, m = 2, all 1: rank 1 starts at 1 and has 6 to do. With room for one micro-batch, two go there and back
    (F F I I) one after the other, and a weight gradient follows: 4 + 4 + 1."""
    shape = schedule("1f1b", stages=2, microbatches=2).shape
    assert lower_bound(shape, flat_costs(shape)) == pytest.approx(7)
    assert lower_bound(shape, flat_costs(shape, weight_grad_memory=0.0), 1) == pytest.approx(9)
