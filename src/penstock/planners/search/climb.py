"""Hill climbing: small changes to a plan, judged by the simulator, which sees more than the dynamic programme."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from penstock.planners.search.candidate import Candidate, Mode
from penstock.planners.search.candidates import SearchSpace

Score = Callable[[Candidate], float]


def climb(field: SearchSpace, start: Candidate, score: Score, best: float, enough: Callable[[], bool]) -> None:
    """Take the first change that is better, until none is; `score` keeps what it has computed."""
    better = True
    while better and not enough():
        better = False
        for other in neighbours(field, start):
            seconds = score(other)
            if seconds < best * (1 - 1e-9):
                start, best, better = other, seconds, True
                break
            if enough():
                return


def neighbours(field: SearchSpace, c: Candidate) -> Iterator[Candidate]:
    for other in (*_shifted(c), *_methods(field, c), *_moved(c), *_modes(field, c), *_merged(field, c)):
        if field.admits(other):
            yield other


def _shifted(c: Candidate) -> Iterator[Candidate]:
    """Yield candidates with one boundary earlier or later."""
    for at in range(1, len(c.bounds) - 1):
        for step in (-1, 1, -2, 2):
            moved = c.bounds[at] + step
            if c.bounds[at - 1] < moved < c.bounds[at + 1]:
                yield replace(c, bounds=(*c.bounds[:at], moved, *c.bounds[at + 1 :]))


def _methods(field: SearchSpace, c: Candidate) -> Iterator[Candidate]:
    for method in field.methods:
        if method != c.method and (method.chunks, method.folded) == (c.method.chunks, c.method.folded):
            yield replace(c, method=method)


def _moved(c: Candidate) -> Iterator[Candidate]:
    """Yield candidates with a replica moved from one rank to another, or added on an unused device."""
    ranks = range(c.ranks) if c.ranks <= 16 else ()
    for a in ranks:
        if c.skip:
            yield replace(c, skip=c.skip - 1, replicas=_with(c.replicas, {a: 1}))
        for b in ranks:
            if a != b and c.replicas[a] > 1:
                yield replace(c, replicas=_with(c.replicas, {a: -1, b: 1}))


def _with(counts: tuple[int, ...], changes: dict[int, int]) -> tuple[int, ...]:
    return tuple(count + changes.get(at, 0) for at, count in enumerate(counts))


def _modes(field: SearchSpace, c: Candidate) -> Iterator[Candidate]:
    """Yield candidates in which one stage treats its activations otherwise."""
    for at, mode in enumerate(c.modes):
        others = [m for m in Mode if m is not mode] if field.again else [Mode.KEEP]
        for other in others:
            if other is Mode.OFFLOAD and not all(device.host_bandwidth for device in field.cluster.devices):
                continue
            if other is not mode:
                yield replace(c, modes=(*c.modes[:at], other, *c.modes[at + 1 :]))


def _merged(field: SearchSpace, c: Candidate) -> Iterator[Candidate]:
    """Yield candidates with two neighbours as one stage, on as many of their devices as it may have."""
    if c.method.chunks > 1:
        return
    for at, (a, b) in enumerate(pairwise(c.replicas)):
        both = min(a + b, field.replicas or a + b)
        yield replace(
            c,
            skip=c.skip + a + b - both,
            bounds=(*c.bounds[: at + 1], *c.bounds[at + 2 :]),
            replicas=(*c.replicas[:at], both, *c.replicas[at + 2 :]),
            modes=(*c.modes[:at], max(c.modes[at], c.modes[at + 1]), *c.modes[at + 2 :]),
        )
