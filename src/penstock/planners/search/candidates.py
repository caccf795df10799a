"""Candidates: labels read back, models in several chunks a rank, and, where there are few, every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from penstock.core.cluster import Cluster
from penstock.core.profile import Profile
from penstock.planners.balance import even_cells
from penstock.planners.chain import LayerSums
from penstock.planners.scaled import scaled
from penstock.planners.search.candidate import Candidate, Mode
from penstock.planners.search.labels import CutLabels
from penstock.planners.search.places import Places
from penstock.planners.search.space import SearchMethod, orders


@dataclass(frozen=True)
class Guess:
    """A candidate, and the seconds that the dynamic programme expects of it."""

    seconds: float
    candidate: Candidate


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """The input of one search: a batch of `microbatches` of the profile's size, on a cluster, by some methods."""

    profile: Profile
    cluster: Cluster
    methods: tuple[SearchMethod, ...]
    microbatches: int
    again: bool = True  # whether stages may recompute or offload
    whole_rows: bool = True  # whether a replica must have at least a row of a micro-batch
    replicas: int | None = None  # of a stage at most

    def sized(self, times: int) -> Profile:
        if times not in self._sizes:
            self._sizes[times] = scaled(self.profile, self.profile.samples * times)
        return self._sizes[times]

    @cached_property
    def _sizes(self) -> dict[int, Profile]:
        return {}

    def places(self, order: tuple[int, ...], alone: bool = False) -> Places:
        if (order, alone) not in self._places:
            self._places[order, alone] = Places.of(self.cluster, order, alone)
        return self._places[order, alone]

    @cached_property
    def _places(self) -> dict[tuple[tuple[int, ...], bool], Places]:
        return {}

    def even(self, stages: int) -> tuple[list[int], float]:
        """Return where equal stages begin and the last ends, and seconds of the largest: the same for every size."""
        if stages not in self._even:
            self._even[stages] = even_cells([layer.seconds for layer in self.profile.layers], stages)
        return self._even[stages]

    @cached_property
    def _even(self) -> dict[int, tuple[list[int], float]]:
        return {}

    def most_replicas(self, method: SearchMethod, times: int) -> int | None:
        """That a stage may have, or None for any number.

        Replicas that take turns average as many batches into one update: only a batch of one micro-batch, as PipeDream
        knows it, is meant so.
        """
        limits = [self.replicas]
        if method.turns:
            limits.append(None if self.microbatches == 1 else 1)
        elif self.whole_rows:
            limits.append(self.profile.samples * times)
        return min((limit for limit in limits if limit is not None), default=None)

    def admits(self, candidate: Candidate) -> bool:
        """Whether the schedule exists for it."""
        method, p, m = candidate.method, candidate.ranks, candidate.steps
        most = self.most_replicas(method, candidate.times)
        if method.schedule == "interleaved" and m % p:
            return False
        if method.schedule == "2bw" and m < p:
            return False
        return most is None or max(candidate.replicas) <= most

    def alike(self, method: SearchMethod) -> Iterator[SearchMethod]:
        """Methods for which the same cut is as good."""
        for other in self.methods:
            same = (other.flush, other.deep, other.turns, other.versions, other.cap) == (
                method.flush, method.deep, method.turns, method.versions, method.cap,
            )  # fmt: skip
            if same and other.chunks == 1:
                yield other


def labelled(
    space: SearchSpace, times: int, order: tuple[int, ...], hurry: Callable[[], bool] = lambda: False
) -> Iterator[Iterator[Guess]]:
    """Yield the best cut for every number of stages, for one kind of method after the other; in a hurry, for fewer."""
    chain, places = LayerSums.of(space.sized(times)), space.places(order)
    yield from _by_kind(space, times, order, chain, places, hurry)
    if places.unit > 1 and chain.layers > 1:
        few = order[-min(len(order), chain.layers) :]
        yield from _by_kind(space, times, few, chain, space.places(few, alone=True), hurry)


def _by_kind(
    space: SearchSpace, times: int, order: tuple[int, ...], chain: LayerSums, places: Places, hurry: Callable[[], bool]
) -> Iterator[Iterator[Guess]]:
    steps, kinds = space.microbatches // times, set()
    some = any(method.flush and not method.whole and method.chunks == 1 for method in space.methods)
    for method in space.methods:
        if method.whole and some:
            continue  # the cuts of others serve it where its memory allows
        kind = (method.flush, method.deep, method.turns, method.versions, method.cap)
        if method.chunks > 1 or kind in kinds:
            continue
        kinds.add(kind)
        most = space.most_replicas(method, times)
        if most is not None and most < places.unit:
            continue  # places of one device each serve it
        for meet in (
            (False, True) if method.turns and most is None else (False,)
        ):  # how much it waits, the clock will say
            labels = CutLabels.of(chain, places, method, steps, space.again, most, meet, hurry)
            yield _read_back(space, times, order, method, labels)


def _read_back(
    space: SearchSpace, times: int, order: tuple[int, ...], method: SearchMethod, labels: CutLabels
) -> Iterator[Guess]:
    """Yield the best candidates of every depth."""
    steps = space.microbatches // times
    for depth in range(1, labels.deepest + 1):
        cut = labels.best(depth)
        if cut is None:
            continue
        replicas = tuple(count * labels.places.unit for count in cut.units)
        skip = len(order) - sum(replicas)
        for other in space.alike(method):
            candidate = Candidate(other, times, steps, order, skip, cut.bounds, replicas, cut.modes)
            if space.admits(candidate):
                yield Guess(cut.value, candidate)


def chunked(space: SearchSpace, times: int, order: tuple[int, ...]) -> Iterator[Guess]:
    """Yield candidates of equal ranks with several chunks each, cut as evenly as can be."""
    steps, devices = space.microbatches // times, len(order)
    slow = 1.0 / min(device.speed for device in space.cluster.devices)
    for method in space.methods:
        for ranks in _halvings(devices) if method.chunks > 1 else ():
            stages = ranks * method.chunks
            if stages > len(space.profile.layers) or ranks < 2:
                continue
            bounds, largest = space.even(stages)
            replicas = (min(devices // ranks, space.replicas or devices),) * ranks
            for mode in (Mode.KEEP, Mode.RECOMPUTE) if space.again else (Mode.KEEP,):
                candidate = Candidate(method, times, steps, order, devices - sum(replicas), tuple(bounds), replicas,
                                 (mode,) * stages)  # fmt: skip
                more = 4 / 3 if mode is Mode.RECOMPUTE else 1.0
                each = times * largest * slow * more / replicas[0]
                if space.admits(candidate):
                    yield Guess(each * (steps * method.chunks + ranks - 1), candidate)


def _halvings(devices: int) -> list[int]:
    """Return ranks worth trying: every divisor, and all devices."""
    return [ranks for ranks in range(2, min(devices, 128) + 1) if devices % ranks == 0]


def every_plan(space: SearchSpace, times: int) -> Iterator[Candidate]:
    """Yield all cuts, all replica counts and all orders, of stages that keep their activations."""
    steps, layers, devices = space.microbatches // times, len(space.profile.layers), len(space.cluster.devices)
    for order in orders(space.cluster):
        for method in space.methods:
            for ranks in range(1 if method.chunks == 1 else 2, min(layers // method.chunks, devices) + 1):
                for cut in combinations(range(1, layers), ranks * method.chunks - 1):
                    for replicas in _counts(ranks, devices):
                        candidate = Candidate(
                            method, times, steps, order, devices - sum(replicas), (0, *cut, layers), replicas,
                            (Mode.KEEP,) * (ranks * method.chunks),
                        )  # fmt: skip
                        if space.admits(candidate):
                            yield candidate


def _counts(ranks: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Yield positive counts for so many ranks, of at most so many devices."""
    if ranks == 0:
        yield ()
        return
    for first in range(1, devices - ranks + 2):
        for rest in _counts(ranks - 1, devices - first):
            yield (first, *rest)
