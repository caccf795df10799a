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
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from math import comb, inf
from random import Random
from time import monotonic
from typing import NamedTuple

from penstock.core.cluster import Cluster
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.validation import truth, whole
from penstock.errors import InputError
from penstock.planners.outcome import Outcome
from penstock.planners.search.bound import lower_bound
from penstock.planners.search.candidate import Candidate
from penstock.planners.search.climb import climb
from penstock.planners.search.lift import Field, Guess, chunked, every_plan, labelled
from penstock.planners.search.space import (
    METHODS,
    Method,
    all_multiples,
    chosen_methods,
    multiples,
    no_order_matters,
    orders,
)
from penstock.planners.short import Need, Rule, least_need, shortage

MOST_MICROBATCHES = 10**7
FEW = 600  # plans that are all simulated
DOUBT = 1.12  # a guess this much above the best is not looked at
LOOKS = 32  # guesses of a method that are simulated at most
HOPELESS = 1.5  # a method whose guesses are all this much above the best plan: none takes less than 0.7 of its guess
GLANCES = 4  # its guesses that are simulated, to tell what it loses
CHANGES = 640  # plans simulated while climbing, at most
STARTS = 2
MARGIN = 0.01  # a gain, as a share, that is worth another schedule


class Scored(NamedTuple):
    """What the simulator says of a plan: seconds of a batch, and bytes that the fullest device is short of."""

    seconds: float
    short: float


Evaluate = Callable[[Plan, Profile], Scored]


@dataclass(frozen=True)
class Runner:
    """The best plan of one schedule."""

    method: str
    seconds: float
    plan: Plan
    profile: Profile


@dataclass(frozen=True)
class Searched(Outcome):
    """An outcome with its proof: no plan takes less than `bound` seconds; and the best plan of every schedule.

    The fastest comes first; one that is faster by less than the share `margin` may have been passed over.
    """

    bound: float = 0.0
    runners: tuple[Runner, ...] = ()
    simulated: int = 0
    exact: bool = False  # every plan was simulated
    stopped: bool = False  # by the time limit
    margin: float = 0.0

    @property
    def gap(self) -> float:
        """How much longer than the bound it takes, as a share; where every plan was simulated, than the fastest."""
        least = self.runners[0].seconds if self.exact else self.bound
        return self.seconds / least - 1 if least else 0.0


@dataclass(eq=False)
class _Search:
    space: Field
    evaluate: Evaluate
    begun: float
    limit: float  # seconds
    known: dict[Candidate, Scored] = field(default_factory=dict)
    best: Candidate | None = None
    seconds: float = inf
    left: int = CHANGES
    margin: float = 0.0

    def score(self, candidate: Candidate) -> float:
        """Seconds of a batch; infinite where it does not fit."""
        found = self.known.get(candidate)
        if found is None:
            self.left -= 1
            found = self.known[candidate] = self.evaluate(candidate.plan(), self.space.sized(candidate.times))
        if found.short > 0:
            return inf
        if found.seconds < self.seconds:
            self.best, self.seconds = candidate, found.seconds
        return found.seconds

    def late(self, share: float = 1.0) -> bool:
        """Whether the time is up, or a share of it."""
        return monotonic() > self.begun + share * self.limit

    def every(self, sizes: list[int]) -> bool:
        """Simulate all plans; whether that was all there is to try, as where no device is short of memory."""
        for times in sizes:
            for candidate in every_plan(self.space, times):
                if self.late() and self.best is not None:
                    return False
                self.score(candidate)
        roomy = not self.space.again or all(found.short <= 0 for found in self.known.values())
        return roomy and not self.late() and no_order_matters(self.space.cluster)

    def look(self, guesses: Iterable[Guess]) -> None:
        """Of every method the most promising first, until the next is thought to be clearly worse than its best."""
        by_method: dict[str, list[Guess]] = {}
        for guess in sorted(guesses, key=lambda guess: guess.seconds):
            by_method.setdefault(guess.candidate.method.name, []).append(guess)
        for mine in by_method.values():
            best, looks = inf, LOOKS if mine[0].seconds < HOPELESS * self.seconds else GLANCES
            for guess in mine[:looks]:
                if guess.seconds > DOUBT * best or (self.late() and self.best is not None):
                    break
                best = min(best, self.score(guess.candidate))

    def improve(self, dice: Random) -> None:
        """Climb from the best of the best methods, flushing or not, and from some others."""
        ranked = sorted(self.fitting(), key=lambda c: self.known[c].seconds)
        starts = [next((c for c in ranked if c.method.flush is flush), None) for flush in (True, False)]
        others = [c for c in ranked[: 4 * STARTS] if c not in starts]
        chosen = [c for c in starts if c is not None] + dice.sample(others, min(STARTS, len(others)))
        for start in chosen:
            self.left = CHANGES // len(chosen)
            climb(self.space, start, self.score, self.known[start].seconds, lambda: self.late() or self.left <= 0)

    def confirm(self, whole: Evaluate) -> None:
        """The best and the one to take again with every replica in the simulation, until both have been confirmed.

        When time is nearly up they are taken as they are: where many devices share a stage, this takes seconds.
        """
        sure: set[Candidate] = set()
        while (
            not self.late(0.75) and (ranked := self.ranked()) and (doubtful := {ranked[0], self.taken(ranked)} - sure)
        ):
            for one in doubtful:
                self.known[one] = whole(one.plan(), self.space.sized(one.times))
            sure |= doubtful

    def fitting(self) -> list[Candidate]:
        return [candidate for candidate, found in self.known.items() if found.short <= 0]

    def tight(self) -> bool:
        """Whether memory decides: nothing fits, or only with less kept or, where all must be kept, not all plans do."""
        if self.best is None or any(self.best.modes):
            return True
        return not self.space.again and any(found.short > 0 for found in self.known.values())

    def ranked(self) -> list[Candidate]:
        """The best of every method, the fastest first."""
        by_method: dict[Method, Candidate] = {}
        for candidate in self.fitting():
            known = by_method.setdefault(candidate.method, candidate)
            if self.known[candidate].seconds < self.known[known].seconds:
                by_method[candidate.method] = candidate
        return sorted(by_method.values(), key=lambda c: self.known[c].seconds)

    def taken(self, ranked: list[Candidate]) -> Candidate:
        """Of those that are about as fast as the first one with a flush if there is any, of the simplest schedule."""
        most = self.known[ranked[0]].seconds * (1 + self.margin)
        near = [c for c in ranked if self.known[c].seconds <= most]
        return min(near, key=lambda c: METHODS.index(c.method))

    def runner(self, c: Candidate) -> Runner:
        return Runner(c.method.name, self.known[c].seconds, c.plan(), self.space.sized(c.times))


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
) -> Outcome:
    """Minimise the seconds of a batch of so many micro-batches of the profile's size.

    `evaluate` may take all replicas of a rank for one, `confirm` does not. `seconds` limits the search; `fixed` keeps
    micro-batches at the profile's size; `whole_rows=False` lets replicas split a row, as planners do that know no rows;
    `replicas` is the most that a stage may have. `allow_async` has asynchronous schedules searched too, which train
    with weights that are some updates old; one that `schedules` names is searched in any case. Between the best plans
    of all schedules `margin` decides: a gain below that share is not worth an asynchronous schedule, nor one that is
    less simple.
    """
    whole("microbatches", microbatches)
    if microbatches > MOST_MICROBATCHES:
        expected = f"a batch of at most {MOST_MICROBATCHES:,} micro-batches of the profile's size"
        raise InputError(expected, f"{microbatches:,}", "profile larger micro-batches")
    whole("seed", seed, 0)
    if replicas is not None:
        whole("replicas", replicas)
    for name, value in (
        ("recompute", recompute),
        ("whole_rows", whole_rows),
        ("fixed", fixed),
        ("allow_async", allow_async),
    ):
        truth(name, value)
    if seconds is not None and not (isinstance(seconds, (int, float)) and seconds >= 0):
        raise InputError("seconds to be 0 or more", seconds, "give the search some time, or no limit")
    if not (isinstance(margin, (int, float)) and 0 <= margin < inf):
        raise InputError("margin to be a share of 0 or more", margin, "0.01 takes a simpler schedule that loses 1%")
    space = Field(
        profile, cluster, chosen_methods(schedules, allow_async), microbatches, recompute, whole_rows, replicas
    )
    sizes = all_multiples(microbatches, fixed)
    capped = tuple(method for method in space.methods if method.cap)
    free = replace(space, methods=tuple(method for method in space.methods if not method.cap) or capped)
    few = _count(free, sizes) <= FEW
    sizes = sizes if few else multiples(microbatches, fixed)
    run = _Search(free, evaluate, monotonic(), inf if seconds is None else seconds, margin=margin)
    bound = min(lower_bound(space.sized(k), cluster, space.methods, microbatches // k, replicas) for k in sizes)
    exact = _try_all(run, sizes, few)
    if capped and run.tight() and (run.best is None or not run.late()):
        run.space = replace(space, methods=capped)
        exact = _try_all(run, sizes, few) and exact
        run.space = space
    if not exact:
        run.improve(Random(seed))
    if confirm is not None:
        run.confirm(confirm)
    ranked = run.ranked()
    if not ranked:
        raise shortage(space.sized(min(sizes)), cluster, partial(_need, space))
    best, *others = map(run.runner, [run.taken(ranked), *ranked])
    return Searched(
        "search", best.plan, best.profile, best.seconds, bound, tuple(others), len(run.known), exact, run.late(), margin
    )


def _try_all(run: _Search, sizes: list[int], few: bool) -> bool:
    """The methods of the run's space; whether every plan there is was simulated."""
    if few and run.every(sizes):
        return True
    _explore(run, sizes)
    return False


def _explore(run: _Search, sizes: list[int]) -> None:
    """Guesses for every size and order, then the simulator; when time is up, as soon as one plan fits."""
    for hurry in (run.late, lambda: False):
        _guess_and_look(run, sizes, hurry)
        if run.best is not None or not run.late():
            return  # else a programme that was cut short may have missed what fits


def _guess_and_look(run: _Search, sizes: list[int], hurry: Callable[[], bool]) -> None:
    """From half of the time on every guess is looked at as soon as it is there."""
    found: list[Guess] = []
    for order, times in product(orders(run.space.cluster), reversed(sizes)):  # large micro-batches are soon simulated
        for some in chain(labelled(run.space, times, order, hurry), [chunked(run.space, times, order)]):
            found += some
            if run.late(0.5):
                run.look(found)
                if run.late() and run.best is not None:
                    return
                found = []
    run.look(found)


def _need(space: Field, profile: Profile, devices: int) -> Need:
    """The least of any method that has one chunk a rank, for as large a batch."""
    steps = space.microbatches * space.profile.samples // profile.samples
    single = [method for method in space.methods if method.chunks == 1]
    least = [method for method in single if method.cap == 1]  # no other needs less
    needs = [least_need(_rule(space, method, steps, devices), profile, devices) for method in least or single]
    return min(needs, key=lambda need: need.bytes, default=Need(0.0, "by a schedule with one chunk a rank"))


def _rule(space: Field, method: Method, steps: int, devices: int) -> Rule:
    """What a method keeps, or at most so much."""
    deepest = steps if method.schedule == "2bw" else None
    if method.split:  # what a stage does not hold for forwards it may hold for weight gradients that wait
        return Rule(method.versions, 0, method.slope * (devices - 1) + 1, False, deepest, space.replicas)
    most, base = 1 if method.turns else space.replicas, 1 if method.slope else steps
    return Rule(method.versions, method.slope, base, space.again, deepest, most, method.cap or None)


def _count(space: Field, sizes: list[int]) -> int:
    """How many plans there are, or more than a few."""
    layers, devices = len(space.profile.layers), len(space.cluster.devices)
    total = sum(comb(layers - 1, s - 1) * comb(devices, s) for s in range(1, min(layers, devices) + 1))
    total *= len(sizes) * len(orders(space.cluster)) * len(space.methods)
    return total
