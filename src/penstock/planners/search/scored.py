"""The plans that a search has simulated: which to simulate next, which to start from, and which to take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from random import Random
from time import monotonic

from penstock.planners.outcome import Evaluate, PlanScore, Runner
from penstock.planners.search.candidate import Candidate
from penstock.planners.search.candidates import Guess, SearchSpace, every_plan
from penstock.planners.search.climb import climb
from penstock.planners.search.space import SearchMethod, all_methods, no_order_matters

DOUBT = 1.12  # a guess this much above the best is not looked at
LOOKS = 32  # guesses of a method that are simulated at most
HOPELESS = 1.5  # a method whose guesses are all this much above the best plan: none takes less than 0.7 of its guess
GLANCES = 4  # its guesses that are simulated, to tell what it loses
CHANGES = 640  # plans simulated while climbing, at most
STARTS = 2


@dataclass(eq=False)
class ScoredPlans:
    """The plans that a search has simulated, the best of them, and the time that is left."""

    space: SearchSpace
    evaluate: Evaluate
    limit: float  # seconds
    scores: dict[Candidate, PlanScore] = field(default_factory=dict)
    best: Candidate | None = None
    seconds: float = inf
    left: int = CHANGES
    margin: float = 0.0

    def __post_init__(self) -> None:
        self.begun = monotonic()

    def score(self, candidate: Candidate) -> float:
        """Return the seconds of a batch; infinite where the plan does not fit."""
        score = self.scores.get(candidate)
        if score is None:
            self.left -= 1
            score = self.scores[candidate] = self.evaluate(candidate.plan(), self.space.sized(candidate.times))
        if score.missing > 0:
            return inf
        if score.seconds < self.seconds:
            self.best, self.seconds = candidate, score.seconds
        return score.seconds

    def late(self, share: float = 1.0) -> bool:
        """Return whether the time is up, or a share of it."""
        return monotonic() > self.begun + share * self.limit

    def every(self, sizes: list[int]) -> bool:
        """Simulate all plans; returns whether nothing else is left to try, as where memory suffices for all of them."""
        for times in sizes:
            for candidate in every_plan(self.space, times):
                if self.late() and self.best is not None:
                    return False
                self.score(candidate)
        roomy = not self.space.again or all(score.missing <= 0 for score in self.scores.values())
        return roomy and not self.late() and no_order_matters(self.space.cluster)

    def look(self, guesses: Iterable[Guess]) -> None:
        """Simulate every method's guesses, best first, until the next is thought to be clearly worse than its best."""
        by_method: dict[str, list[Guess]] = {}
        for guess in sorted(guesses, key=lambda guess: guess.seconds):
            by_method.setdefault(guess.candidate.method.name, []).append(guess)
        for ranked in by_method.values():
            best, looks = inf, LOOKS if ranked[0].seconds < HOPELESS * self.seconds else GLANCES
            for guess in ranked[:looks]:
                if guess.seconds > DOUBT * best or (self.late() and self.best is not None):
                    break
                best = min(best, self.score(guess.candidate))

    def improve(self, dice: Random) -> None:
        """Climb from the best of the best methods, flushing or not, and from some others."""
        ranked = sorted(self.fitting(), key=lambda c: self.scores[c].seconds)
        starts = [next((c for c in ranked if c.method.flush is flush), None) for flush in (True, False)]
        others = [c for c in ranked[: 4 * STARTS] if c not in starts]
        chosen = [c for c in starts if c is not None] + dice.sample(others, min(STARTS, len(others)))
        for start in chosen:
            self.left = CHANGES // len(chosen)
            climb(self.space, start, self.score, self.scores[start].seconds, lambda: self.late() or self.left <= 0)

    def confirm(self, whole: Evaluate) -> None:
        """Simulate the best plan and the one to take again with every replica, until both have been confirmed.

        When time is nearly up they are taken as they are: where many devices share a stage, this takes seconds.
        """
        sure: set[Candidate] = set()
        while (
            not self.late(0.75) and (ranked := self.ranked()) and (doubtful := {ranked[0], self.taken(ranked)} - sure)
        ):
            for one in doubtful:
                self.scores[one] = whole(one.plan(), self.space.sized(one.times))
            sure |= doubtful

    def fitting(self) -> list[Candidate]:
        return [candidate for candidate, score in self.scores.items() if score.missing <= 0]

    def tight(self) -> bool:
        """Return whether memory decides: nothing fits, or only with less kept, or not all plans fit with all kept."""
        if self.best is None or any(self.best.modes):
            return True
        return not self.space.again and any(score.missing > 0 for score in self.scores.values())

    def ranked(self) -> list[Candidate]:
        """Return the best of every method, the fastest first."""
        by_method: dict[SearchMethod, Candidate] = {}
        for candidate in self.fitting():
            best = by_method.setdefault(candidate.method, candidate)
            if self.scores[candidate].seconds < self.scores[best].seconds:
                by_method[candidate.method] = candidate
        return sorted(by_method.values(), key=lambda c: self.scores[c].seconds)

    def taken(self, ranked: list[Candidate]) -> Candidate:
        """Return the plan to take: of those about as fast as the first, the one of the simplest schedule."""
        most = self.scores[ranked[0]].seconds * (1 + self.margin)
        near = [c for c in ranked if self.scores[c].seconds <= most]
        methods = all_methods()
        return min(near, key=lambda c: methods.index(c.method))

    def runner(self, c: Candidate) -> Runner:
        return Runner(c.method.name, self.scores[c].seconds, c.plan(), self.space.sized(c.times))
