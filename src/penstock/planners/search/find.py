"""Partition, replicas, placement, micro-batches, schedule, recompute and offload together, under each device's memory.

Steps: (1) a bound that no plan can beat; (2) where there are few plans, all of them are simulated; else (3) for every
size of micro-batch and order of devices, the best cut for every depth by dynamic programming; (4) those are simulated,
the most promising first, until the next is thought to be clearly worse than the best; (5) small changes to the best few
that the simulator likes. Where memory decides, (3) and (4) come once more for schedules that keep fewer micro-batches
in flight than would be fastest. Of the best plans of all schedules that are about as fast, the one is taken that
changes training least. A planner that wants the simulator is handed a function: `evaluate(plan, profile)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain, product
from math import comb, inf
from random import Random

from penstock.core.cluster import Cluster
from penstock.core.profile import Profile
from penstock.core.validation import truth, whole
from penstock.errors import InputError
from penstock.planners.infeasible import Need, Rule, least_need, shortage
from penstock.planners.outcome import Evaluate, PlanOutcome, Searched
from penstock.planners.search.bound import lower_bound
from penstock.planners.search.candidates import Guess, SearchSpace, chunked, labelled
from penstock.planners.search.scored import ScoredPlans
from penstock.planners.search.space import SearchMethod, all_multiples, chosen_methods, multiples, orders

MOST_MICROBATCHES = 10**7
FEW = 600  # plans that are all simulated
MARGIN = 0.01  # a gain, as a share, that is worth another schedule


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    microbatches: int,
    evaluate: Evaluate,
    confirm: Evaluate | None = None,
    schedules: str | Iterable[str] = "any",
    seconds: float | None = None,
    seed: int = 0,
    recompute: bool = True,
    whole_rows: bool = True,
    fixed: bool = False,
    replicas: int | None = None,
    margin: float = MARGIN,
    allow_async: bool = False,
) -> PlanOutcome:
    """Minimise the seconds of a batch of so many micro-batches of the profile's size.

    `evaluate` may take all replicas of a rank for one, `confirm` does not. `seconds` limits the search; `fixed` keeps
    micro-batches at the profile's size; `whole_rows=False` lets replicas split a row, as planners do that know no rows;
    `replicas` is the most that a stage may have. `allow_async` has asynchronous schedules searched too, which train
    with weights that are some updates old; one that `schedules` names is searched in any case. Between the best plans
    of all schedules `margin` decides: a gain below that share is not worth an asynchronous schedule, nor one that is
    less simple.
    """
    _require_numbers(microbatches, seed, replicas, seconds, margin)
    for name, value in (
        ("recompute", recompute),
        ("whole_rows", whole_rows),
        ("fixed", fixed),
        ("allow_async", allow_async),
    ):
        truth(name, value)
    space = SearchSpace(
        profile, cluster, chosen_methods(schedules, allow_async), microbatches, recompute, whole_rows, replicas
    )
    free = replace(space, methods=tuple(method for method in space.methods if not method.cap) or space.methods)
    few = _count(free, all_multiples(microbatches, fixed)) <= FEW
    sizes = all_multiples(microbatches, fixed) if few else multiples(microbatches, fixed)
    plans = ScoredPlans(free, evaluate, inf if seconds is None else seconds, margin=margin)
    bound = _bound(space, sizes)
    exact = _simulate(plans, space, sizes, few)
    if not exact:
        plans.improve(Random(seed))
    if confirm is not None:
        plans.confirm(confirm)
    return _outcome(plans, space, sizes, bound, exact)


def _require_numbers(microbatches: int, seed: int, replicas: int | None, seconds: float | None, margin: float) -> None:
    """Raise InputError for a number that no search can use."""
    whole("microbatches", microbatches)
    if microbatches > MOST_MICROBATCHES:
        expected = f"a batch of at most {MOST_MICROBATCHES:,} micro-batches of the profile's size"
        raise InputError(expected, f"{microbatches:,}", "profile larger micro-batches")
    whole("seed", seed, 0)
    if replicas is not None:
        whole("replicas", replicas)
    if seconds is not None and not (isinstance(seconds, (int, float)) and seconds >= 0):
        raise InputError("seconds to be 0 or more", seconds, "give the search some time, or no limit")
    if not (isinstance(margin, (int, float)) and 0 <= margin < inf):
        raise InputError("margin to be a share of 0 or more", margin, "0.01 takes a simpler schedule that loses 1%")


def _bound(space: SearchSpace, sizes: list[int]) -> float:
    """Return seconds that no plan of the space can beat."""
    sized = [(space.sized(times), space.microbatches // times) for times in sizes]
    return min(lower_bound(profile, space.cluster, space.methods, steps, space.replicas) for profile, steps in sized)


def _simulate(plans: ScoredPlans, space: SearchSpace, sizes: list[int], few: bool) -> bool:
    """Try the schedules without a limit of micro-batches in flight, and those with one where memory decides.

    Returns whether every plan there is was simulated.
    """
    capped = tuple(method for method in space.methods if method.cap)
    exact = _try_all(plans, sizes, few)
    if capped and plans.tight() and (plans.best is None or not plans.late()):
        plans.space = replace(space, methods=capped)
        exact = _try_all(plans, sizes, few) and exact
        plans.space = space
    return exact


def _outcome(plans: ScoredPlans, space: SearchSpace, sizes: list[int], bound: float, exact: bool) -> PlanOutcome:
    """Return the plan to take, with the best of every schedule and the bound; raise InputError where nothing fits."""
    ranked = plans.ranked()
    if not ranked:
        raise shortage(space.sized(min(sizes)), space.cluster, partial(_need, space))
    best, *others = map(plans.runner, [plans.taken(ranked), *ranked])
    return Searched(
        "search",
        best.plan,
        best.profile,
        best.seconds,
        bound,
        tuple(others),
        len(plans.scores),
        exact,
        plans.late(),
        plans.margin,
    )


def _try_all(run: ScoredPlans, sizes: list[int], few: bool) -> bool:
    """Try the methods of the run's space; returns whether every plan there is was simulated."""
    if few and run.every(sizes):
        return True
    _explore(run, sizes)
    return False


def _explore(run: ScoredPlans, sizes: list[int]) -> None:
    """Guess for every size and order, then simulate; when time is up, stop as soon as one plan fits."""
    for hurry in (run.late, lambda: False):
        _guess_and_look(run, sizes, hurry)
        if run.best is not None or not run.late():
            return  # else a programme that was cut short may have missed what fits


def _guess_and_look(run: ScoredPlans, sizes: list[int], hurry: Callable[[], bool]) -> None:
    """Guess for every size and order and simulate the best; when half of the time is up, simulate guesses at once."""
    guesses: list[Guess] = []
    for order, times in product(orders(run.space.cluster), reversed(sizes)):  # large micro-batches are soon simulated
        for some in chain(labelled(run.space, times, order, hurry), [chunked(run.space, times, order)]):
            guesses += some
            if run.late(0.5):
                run.look(guesses)
                if run.late() and run.best is not None:
                    return
                guesses = []
    run.look(guesses)


def _need(space: SearchSpace, profile: Profile, devices: int) -> Need:
    """Return the least need of any method that has one chunk a rank, for as large a batch."""
    steps = space.microbatches * space.profile.samples // profile.samples
    single = [method for method in space.methods if method.chunks == 1]
    least = [method for method in single if method.cap == 1]  # no other needs less
    needs = [least_need(_rule(space, method, steps, devices), profile, devices) for method in least or single]
    return min(needs, key=lambda need: need.bytes, default=Need(0.0, "by a schedule with one chunk a rank"))


def _rule(space: SearchSpace, method: SearchMethod, steps: int, devices: int) -> Rule:
    """Return the rule of what a method keeps, or of more than that."""
    deepest = steps if method.schedule == "2bw" else None
    if method.split:  # what a stage does not hold for forwards it may hold for weight gradients that wait
        return Rule(method.versions, 0, method.slope * (devices - 1) + 1, False, deepest, space.replicas)
    most, base = 1 if method.turns else space.replicas, 1 if method.slope else steps
    return Rule(method.versions, method.slope, base, space.again, deepest, most, method.cap or None)


def _count(space: SearchSpace, sizes: list[int]) -> int:
    """Return how many plans there are, or a number above that."""
    layers, devices = len(space.profile.layers), len(space.cluster.devices)
    total = sum(comb(layers - 1, s - 1) * comb(devices, s) for s in range(1, min(layers, devices) + 1))
    total *= len(sizes) * len(orders(space.cluster)) * len(space.methods)
    return total
