"""What each method computes by its published rule, as the expressions of symbolic.py: no schedule anywhere.

A rule says which weight version the forward and the backward of micro-batch k use on stage s. From that alone the
weights follow by recursion: version v + 1 of a stage is version v and the gradients of the mini-batches of round v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import lcm

from symbolic import Outcome, Terms

Version = Callable[[int, int], int]  # (stage, micro-batch) -> version


@dataclass(frozen=True)
class Setting:
    """The model and the data: the stages' edges, m micro-batches a mini-batch, mini-batches, replicas of each stage."""

    edges: tuple[tuple[int, int], ...]
    m: int
    batches: int
    replicas: tuple[int, ...]
    turns: bool = False

    @property
    def stages(self) -> int:
        return len(self.replicas)

    def round(self, stage: int, k: int) -> int:
        """Which update of a stage takes in micro-batch k: with turns, one round is one mini-batch a replica."""
        return k // self.m // (self.replicas[stage] if self.turns else 1)

    def rounds(self, stage: int) -> int:
        return self.round(stage, self.m * self.batches - 1) + 1


def chain(stages: int) -> tuple[tuple[int, int], ...]:
    return tuple((s, s + 1) for s in range(stages - 1))


def warm_up(replicas: tuple[int, ...], m: int = 1) -> list[int]:
    """PipeDream: floor((workers - 1 - replicas of earlier stages) / own replicas), in whole mini-batches where replicas
    take turns, in micro-batches in a plain pipeline."""
    unit = m if max(replicas) > 1 else 1
    return [(sum(replicas) - 1 - sum(replicas[:s])) // r * unit for s, r in enumerate(replicas)]


def sync(at: Setting) -> tuple[Version, Version]:
    """Mini-batch b uses the weights that the b mini-batches before it made."""
    return (lambda s, k: k // at.m), (lambda s, k: k // at.m)


def two_bw(at: Setting) -> tuple[Version, Version]:
    """Micro-batch k, from 1: max(floor((k - 1) / m) - 1, 0). Here k is from 0."""
    return (lambda s, k: max(k // at.m - 1, 0)), (lambda s, k: max(k // at.m - 1, 0))


def _turn(at: Setting, s: int, k: int) -> int:
    """The number of micro-batch k among those that its replica of stage s sees."""
    return k // at.m // (at.replicas[s] if at.turns else 1) * at.m + k % at.m


def stash(at: Setting) -> tuple[Version, Version]:
    """With w forwards ahead, the t-th forward of a replica follows t - w backwards, and m of them make a version."""
    warm = warm_up(at.replicas, at.m)

    def version(s: int, k: int) -> int:
        return max(_turn(at, s, k) - warm[s], 0) // at.m

    return version, version


def vertical(at: Setting) -> tuple[Version, Version]:
    """What the first stage used, counted in the mini-batches it had taken in."""
    first, _ = stash(at)

    def version(s: int, k: int) -> int:
        return first(0, k) * at.replicas[0] // at.replicas[s]

    return version, version


def no_stash(at: Setting) -> tuple[Version, Version]:
    """The forward as with stashing; the t-th backward follows t backwards."""
    return stash(at)[0], lambda s, k: _turn(at, s, k) // at.m


def pipemare(at: Setting) -> tuple[Version, Version]:
    """1F1B without flush: p-1-s forwards ahead, each use takes the newest. Replicas split rows and change nothing."""
    return (lambda s, k: max(k - (at.stages - 1 - s), 0) // at.m), (lambda s, k: k // at.m)


RULES = {f.__name__: f for f in (sync, two_bw, stash, vertical, no_stash, pipemare)}


def expected(at: Setting, rule: str, terms: Terms) -> Outcome:
    """The outcome of a whole run by the rule."""
    forward_version, backward_version = RULES[rule](at)
    before = {s: sorted(a for a, b in at.edges if b == s) for s in range(at.stages)}
    after = {s: sorted(b for a, b in at.edges if a == s) for s in range(at.stages)}
    grains = 1 if at.turns else lcm(*at.replicas)
    total = at.m * at.batches

    @cache
    def weights(s: int, version: int) -> int:
        if version == 0:
            return terms.of("init", s)
        parts = [k for k in range(total) if at.round(s, k) == version - 1]
        gradients = sorted(weight_gradient(s, k, grain) for k in parts for grain in range(grains))
        return terms.of("update", weights(s, version - 1), tuple(gradients))

    @cache
    def forward(s: int, k: int, grain: int) -> int:
        inputs = tuple(forward(a, k, grain) for a in before[s]) or (terms.of("data", k, grain),)
        return terms.of("fwd", s, weights(s, forward_version(s, k)), inputs)

    @cache
    def incoming(s: int, k: int, grain: int) -> tuple[int, ...]:
        return tuple(input_gradient(b, s, k, grain) for b in after[s]) or (terms.of("loss", s, k, grain),)

    def input_gradient(s: int, a: int, k: int, grain: int) -> int:
        used = weights(s, backward_version(s, k))
        return terms.of("gin", a, forward(s, k, grain), used, incoming(s, k, grain))

    def weight_gradient(s: int, k: int, grain: int) -> int:
        used = weights(s, backward_version(s, k))
        return terms.of("gw", forward(s, k, grain), used, incoming(s, k, grain))

    out = Outcome()
    for s, copies in enumerate(at.replicas):
        for replica in range(copies):
            out.weights[s, replica] = weights(s, at.rounds(s))
        for k in range(total):
            for replica in [k // at.m % copies] if at.turns else range(copies):
                out.uses["F", s, replica, k] = forward_version(s, k)
                out.uses["I", s, replica, k] = out.uses["W", s, replica, k] = backward_version(s, k)
    return out
