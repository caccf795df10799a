"""`auto` against brute force on small pipelines, and brute force against every order written out."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from brute_force import Pipeline, best_makespan

from penstock import ScheduleError
from penstock.core.action import Action
from penstock.core.cost import flat_costs
from penstock.core.schedule import Schedule
from penstock.schedules.auto.bound import lower_bound
from penstock.schedules.registry import schedule
from penstock.simulator.simulate import simulate_costs

SIZES = [(2, 1), (2, 2), (2, 3), (2, 4), (2, 4), (2, 4), (3, 1), (3, 2), (3, 3), (3, 3), (3, 3)]


def draw(random, sizes=SIZES):
    """A small pipeline: real or whole seconds, links from none to slow, memory from one micro-batch to plenty."""
    p, m = random.choice(sizes)
    whole = random.random() < 0.5
    seconds = [[float(random.randint(1, 4)) if whole else random.uniform(0.3, 2) for _ in range(p)] for _ in range(3)]
    transfer = [random.choice((0.0, 0.0, 0.5, 1.5)) * random.random() for _ in range(p - 1)]
    cap = [random.choice((1, 1.5, 2, 2.5, 3, 4, 9)) for _ in range(p)]
    return Pipeline(m, *seconds, transfer, cap, random.choice((0.0, 0.3, 0.5, 1.0)))


def numbers_of(pipeline):
    forward, input_grad, weight_grad = pipeline.seconds
    return {
        "forward": forward,
        "input_grad": input_grad,
        "weight_grad": weight_grad,
        "transfer": pipeline.transfer,
        "weight_grad_memory": pipeline.held,
    }


def makespan(pipeline, built):
    line = simulate_costs(built, flat_costs(built.shape, **numbers_of(pipeline)))
    return line.makespan if (line.peak_activations <= [c + 1e-9 for c in pipeline.cap]).all() else float("inf")


@pytest.mark.slow
def test_equals_brute_force_nine_times_of_ten():
    random, ratios = Random(2), []
    for _ in range(200):
        pipeline = draw(random)
        numbers = numbers_of(pipeline)
        built = schedule("auto", stages=pipeline.p, microbatches=pipeline.m, memory=pipeline.cap, **numbers)
        ours = makespan(pipeline, built)
        best = best_makespan(pipeline, at_most=ours)
        assert lower_bound(built.shape, flat_costs(built.shape, **numbers), pipeline.cap) <= best * (1 + 1e-9)
        ratios.append(ours / best)
    assert sum(ratio <= 1 + 1e-9 for ratio in ratios) >= 0.9 * len(ratios)
    assert max(ratios) <= 1.05


def every_order(m):
    """All orders of one rank in which each kind goes in order and F before I before W."""

    def extend(f, i, w):
        if w == m:
            yield ()
        for op, step, allowed in (("F", (1, 0, 0), f < m), ("I", (0, 1, 0), i < f), ("W", (0, 0, 1), w < i)):
            if allowed:
                number = {"F": f, "I": i, "W": w}[op]
                for rest in extend(f + step[0], i + step[1], w + step[2]):
                    yield ((op, number), *rest)

    return list(extend(0, 0, 0))


def written_out(pipeline, shape):
    """The best makespan of all orders, each timed by the simulator; those that never end are left out."""
    best = float("inf")
    for orders in product(every_order(pipeline.m), repeat=pipeline.p):
        slots = [[Action.parse(f"{r}{op}{k}") for op, k in order] for r, order in enumerate(orders)]
        try:
            best = min(best, makespan(pipeline, Schedule.of_slots(shape, slots)))
        except ScheduleError:  # a deadlock
            continue
    return best


@pytest.mark.parametrize("seed", range(8))
def test_brute_force_equals_all_orders_written_out(seed):
    pipeline = draw(Random(seed), [(2, 1), (2, 2)])
    shape = schedule("1f1b", stages=2, microbatches=pipeline.m).shape
    assert best_makespan(pipeline) == pytest.approx(written_out(pipeline, shape))


def test_orders_of_one_rank():
    assert len(every_order(1)) == 1
    assert len(every_order(2)) == 5
    assert len(every_order(3)) == 42  # standard fillings of a 3 x 3 square
