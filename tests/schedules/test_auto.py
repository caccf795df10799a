"""`auto` against the named methods: never worse, mostly better; sound, within memory, the same every time."""

from __future__ import annotations

import math
import subprocess
import sys
from random import Random

import numpy as np
import pytest
from auto_cases import PLACEMENTS, ROUNDING, draw

from penstock.core import jit
from penstock.core.check import check
from penstock.core.cost import flat_costs
from penstock.core.lower import lower
from penstock.schedules.auto.bound import lower_bound
from penstock.schedules.registry import schedule
from penstock.simulator.simulate import simulate_costs

QUICK = 300  # far below the usual effort: what holds here holds all the more with more


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """The simulator's loops, which run thousands of times here; the bits are the same."""
    monkeypatch.setattr(jit, "COMPILE_FROM", 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_never_worse_than_a_named_method_that_fits(seed):
    """Five sets of costs a seed: 200 in all. Judged by the simulator's clock and by core.memory."""
    random = Random(seed)
    for placement in ("straight", "straight", "straight", "v", "interleaved"):
        named = math.inf
        while named == math.inf:  # until some named method fits, so that every set compares something
            case = draw(random, placement, (2, 8), (4, 32))
            named = case.best_named()
        built = case.auto(effort=QUICK)
        line = case.time(built)
        assert case.fits(line), case
        assert line.makespan <= named * ROUNDING, case
        assert line.makespan * ROUNDING >= lower_bound(built.shape, case.costs(built), case.memory), case


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_beats_the_best_named_method_in_half_of_the_sets(placement):
    """Only sets in which some named method fits count: elsewhere there is nothing to beat."""
    random, ratios = Random(1), []
    while len(ratios) < 24:
        case = draw(random, placement, (4, 8), (8, 32))
        named = case.best_named()
        if named < math.inf:
            ratios.append(case.time(case.auto(effort=QUICK)).makespan / named)
    wins = sum(ratio * ROUNDING < 1 for ratio in ratios)
    assert wins >= len(ratios) / 2, f"{wins} of {len(ratios)}"


def test_reaches_the_figures_of_the_best_named_methods_at_equal_costs():
    """p = 8, m = 32: makespan minus work of zb-h1 is 7, of zb-v 3.5, which the bound proves to be the best."""
    for chunks, memory, over in ((1, 8, 7.0), (2, 8, 3.5)):
        built = schedule("auto", stages=8, microbatches=32, chunks=chunks, memory=memory)
        line = simulate_costs(built, flat_costs(built.shape))
        assert line.makespan - 96 == pytest.approx(over)
        assert lower_bound(built.shape, flat_costs(built.shape), memory) == pytest.approx(96 + over)


def test_the_order_drawn_in_the_file():
    built = schedule("auto", stages=2, microbatches=3, chunks=1, memory=2)
    assert [" ".join(words) for words in built.words()] == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


COSTS = [
    {},
    {"memory": 3},
    {"forward": [1, 1.4, 1, 0.8], "memory": 4},
    {"forward": [1, 1, 3, 1], "transfer": 0.25},
    {"transfer": 2.0},
]


@pytest.mark.parametrize("numbers", COSTS, ids=str)
def test_the_placement_is_chosen_where_nobody_names_one(numbers):
    """As fast as the fastest of the named methods with one chunk a rank or two, and of auto with either."""

    def seconds(built):
        costs = flat_costs(built.shape, **{key: value for key, value in numbers.items() if key != "memory"})
        line = simulate_costs(built, costs)
        return line.makespan if line.peak_activations.max() <= numbers.get("memory", math.inf) + 1e-9 else math.inf

    def build(name, **asked):
        return schedule(name, stages=4, microbatches=8, **asked)

    found = seconds(build("auto", effort=QUICK, **numbers))
    named = ("1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved", "dualpipe-v")
    assert found <= min(seconds(build(name)) for name in named) * ROUNDING
    own = [(1, "straight"), (2, "v"), (2, "interleaved")]
    fixed = (build("auto", effort=QUICK, chunks=chunks, placement=at, **numbers) for chunks, at in own)
    assert found == pytest.approx(min(map(seconds, fixed)))


def test_chunks_that_are_given_stay():
    for chunks in (1, 2, 3):
        assert schedule("auto", stages=3, microbatches=6, chunks=chunks, effort=0).shape.chunks == chunks


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_same_seed_same_schedule(placement):
    case = draw(Random(5), placement, (4, 4), (8, 8))
    assert case.auto(effort=QUICK, seed=3) == case.auto(effort=QUICK, seed=3)


def test_more_effort_is_not_needed_to_be_sound():
    for effort in (0, 1, 50):
        assert check(schedule("auto", stages=3, microbatches=5, memory=2, effort=effort, forward=[1, 3, 2])).ok


@pytest.mark.parametrize(
    "asked",
    [
        {"stages": 1, "microbatches": 1},
        {"stages": 1, "microbatches": 3, "chunks": 3},
        {"stages": 3, "microbatches": 4, "chunks": 3, "memory": 1.5},
        {"stages": 3, "microbatches": 2, "chunks": 2, "memory": 1},
        {"stages": 3, "microbatches": 4, "replicas": (2, 1, 3), "batches": 3},
        {"stages": 4, "microbatches": 4, "edges": ((0, 1), (1, 2), (2, 3), (0, 3))},
        {"stages": 3, "microbatches": 4, "memory": [1, 2, 3], "transfer": [0.1, 2]},
        {"stages": 2, "microbatches": 3, "forward": 0, "input_grad": 0, "weight_grad": 0},
    ],
    ids=str,
)
def test_sound_for_odd_requests(asked):
    built = schedule("auto", effort=QUICK, **asked)
    for one in (built, lower(built)):
        report = check(one)
        assert report.ok, str(report)


def test_memory_is_kept_with_recompute_and_replicas():
    """Ready costs: a recomputed stage keeps its inputs and needs a whole A again for its backward."""
    shape = schedule("auto", stages=3, microbatches=6, replicas=2, chunks=1, effort=0).shape
    costs = flat_costs(shape, recompute=True, recompute_memory=0.25, forward=[1, 2, 1])
    built = schedule("auto", stages=3, microbatches=6, replicas=2, costs=costs, memory=0.75)
    peak = simulate_costs(built, costs).peak_activations
    assert (peak <= 0.75 + 1e-9).all()
    assert np.isclose(peak.max(), 0.75)  # and made use of


def test_a_small_case_needs_no_compiler():
    code = (
        "import sys; from penstock.schedules.registry import schedule; "
        "schedule('auto', stages=4, microbatches=8, forward=[1, 2, 1, 1.5], memory=3); "
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
