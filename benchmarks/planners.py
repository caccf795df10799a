"""PipeDream's planner beside the published recursion in plain Python, in one run: seconds, ratio, equal answers.

    python -m benchmarks.planners            resnet101 and gnmt_large, if ../shared/profiles is there, and a grid
    python -m benchmarks.planners --large    and a grid of 1,521 states (plain Python needs minutes)

`ours` is the whole call: states, sums, recursion, plan; the best of three, the compiler's warm-up apart. `plain` is the
recursion alone, on tables made beforehand: lists of (value, split, replicas), one loop inside the other. Both work on
the same states. A grid is two parallel branches of equal length, the widest graph for its number of layers.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from random import Random

from penstock import Cluster, Layer, Level, Profile
from penstock.core.text_profile import read_text_profile
from penstock.planners.ideals import Ideals
from penstock.planners.pipedream import pipedream

PROFILES = Path(__file__).parents[2] / "shared" / "profiles"
WORKERS, BANDWIDTH = 16, 3.125e9


def plain(states, workers, bandwidth):
    """A(0->j, m) for every state and count, by the published recursion with the paper's constant."""
    n = len(states)
    seconds, weights, cut = (list(map(float, a)) for a in (states.seconds, states.parameters, states.cut))
    inside = [[i for i in range(1, n) if states.below[i, j]] for j in range(n)]
    begin = time.perf_counter()
    table = [[(None, None, None)] * (workers + 1) for _ in range(n)]
    for j in range(1, n):
        for m in range(1, workers + 1):
            table[j][m] = (max(seconds[j], 2 * (m - 1) * weights[j] / bandwidth) / m, None, m)
    for m in range(2, workers + 1):
        for j in range(1, n):
            best, split, replicas = table[j][m]
            for s in inside[j]:
                crossing = 2 * cut[s] / bandwidth
                compute, moved = seconds[j] - seconds[s], weights[j] - weights[s]
                for last in range(1, m):
                    stage = max(compute, 2 * (last - 1) * moved / bandwidth) / last
                    value = max(table[s][m - last][0], crossing, stage)
                    if value < best:
                        best, split, replicas = value, s, last
            table[j][m] = (best, split, replicas)
    return table[n - 1][workers][0], time.perf_counter() - begin


def ours(profile, cluster):
    pipedream(profile, cluster)  # loads or compiles the kernel
    spent = math.inf
    for _ in range(3):
        begin = time.perf_counter()
        found = pipedream(profile, cluster)
        spent = min(spent, time.perf_counter() - begin)
    return found.seconds, spent


def grid(length):
    """A source, two branches and a sink; random costs."""
    random = Random(length)
    layers = tuple(
        Layer(f"L{at}", random.random(), 0, 0, random.random() * 1e8, parameter_bytes=random.random() * 1e8)
        for at in range(2 * length + 2)
    )  # fmt: skip
    last = 2 * length + 1
    edges = {(0, 1), (0, 2), (last - 2, last), (last - 1, last)} | {(at, at + 2) for at in range(1, last - 2)}
    return Profile(layers, tuple(sorted(edges)))


def main():
    parser = argparse.ArgumentParser(description="PipeDream's planner beside the published recursion in plain Python")
    parser.add_argument("--large", action="store_true", help="and a grid of 1,521 states")
    cases = {"grid 19 x 19": grid(19)} | ({"grid 38 x 38": grid(38)} if parser.parse_args().large else {})
    if PROFILES.exists():
        cases = {name: read_text_profile(PROFILES / f"{name}.txt") for name in ("resnet101", "gnmt_large")} | cases
    cluster = Cluster.uniform((Level("link", WORKERS, BANDWIDTH),))
    print(f"{'case':<14} {'states':>6} {'workers':>7} {'ours':>10} {'plain':>10} {'ratio':>7}  answers")
    for name, profile in cases.items():
        states = Ideals.of(profile)
        found, quick = ours(profile, cluster)
        expected, slow = plain(states, WORKERS, BANDWIDTH)
        same = "equal" if math.isclose(found, expected, rel_tol=1e-12) else f"{found} but {expected}"
        print(
            f"{name:<14} {len(states):>6} {WORKERS:>7} {quick:>8.3f} s {slow:>8.2f} s {slow / quick:>6.0f}x  {same}",
            flush=True,
        )


if __name__ == "__main__":
    main()
