"""PipeDream's planner beside the published recursion in plain Python, in one run: seconds, ratio, equal answers.

    python -m benchmarks.planners            resnet101 and gnmt_large, if ../shared/profiles is there, and a grid
    python -m benchmarks.planners --large    and a grid of 1,521 states (plain Python needs minutes)

`ours` is the whole call: states, sums, recursion, plan; the best of three, the compiler's warm-up apart. `plain` is the
recursion alone, on tables made beforehand: lists of (value, split, replicas), one loop inside the other. Both work on
the same states, apart from the line "as published", where plain has those that the published solver walks through
(published_states.py); the empty state is not counted. A grid is two parallel branches of equal length, the widest graph
for its number of layers.

Then how DAPPLE's planner grows with machines and devices, on 50 layers of random costs; CPU seconds, one run.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from random import Random

from benchmarks.published_states import published_states
from penstock import Cluster, Layer, Level, Profile
from penstock.core.text_profile import read_text_profile
from penstock.planners.dapple import dapple
from penstock.planners.ideals import Ideals
from penstock.planners.pipedream import pipedream

PROFILES = Path(__file__).parents[2] / "shared" / "profiles"
WORKERS, BANDWIDTH = 16, 3.125e9
MACHINES = ((2, 8), (4, 4), (16, 1), (32, 1), (4, 8))  # machines, and devices of each


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


def cases(large):
    """(name, profile, the states of the plain recursion)."""
    if PROFILES.exists():
        for name in ("resnet101", "gnmt_large"):
            profile = read_text_profile(PROFILES / f"{name}.txt")
            yield name, profile, Ideals.of(profile)
        yield "gnmt_large as published", profile, Ideals.over(profile, published_states(profile))
    for length in (19, 38) if large else (19,):
        yield f"grid {length} x {length}", grid(length), Ideals.of(grid(length))


def chain(layers):
    """Milliseconds, megabytes."""
    random = Random(layers)

    def layer(at):
        times = (random.uniform(0.5e-3, 1.5e-3) for _ in range(3))
        sizes = {"output_bytes": random.uniform(1e6, 4e6), "parameter_bytes": random.uniform(1e6, 20e6)}
        return Layer(f"L{at}", *times, **sizes)

    return Profile(tuple(layer(at) for at in range(layers)))


def grow():
    print(f"\n{'dapple, 50 layers':<24} {'devices':>7} {'CPU':>8} {'L':>10}  replicas")
    for machines, devices in MACHINES:
        inside = Level("inside", devices, 25e9, 5e-6, 25e9, reduce_rings=True)
        cluster = Cluster.uniform((inside, Level("between", machines, 1e9, 1e-5, 3e9)))
        begin = time.process_time()
        found = dapple(chain(50), cluster, microbatches=64)
        spent = time.process_time() - begin
        name, replicas = f"{machines} machines of {devices}", ":".join(map(str, found.plan.replicas))
        print(f"{name:<24} {machines * devices:>7} {spent:>6.2f} s {found.seconds:>8.4f} s  {replicas}", flush=True)


def main():
    parser = argparse.ArgumentParser(description="PipeDream's planner beside the published recursion in plain Python")
    parser.add_argument("--large", action="store_true", help="and a grid of 1,521 states")
    cluster = Cluster.uniform((Level("link", WORKERS, BANDWIDTH),))
    print(f"{'case':<24} {'states':>6} {'workers':>7} {'ours':>8} {'plain':>10} {'ratio':>7}  answers")
    for name, profile, states in cases(parser.parse_args().large):
        found, quick = ours(profile, cluster)
        expected, slow = plain(states, WORKERS, BANDWIDTH)
        same = "equal" if math.isclose(found, expected, rel_tol=1e-12) else f"{found} but {expected}"
        times = f"{quick:>6.3f} s {slow:>8.2f} s {slow / quick:>6,.0f}x"
        print(f"{name:<24} {len(states) - 1:>6} {WORKERS:>7} {times}  {same}", flush=True)
    grow()


if __name__ == "__main__":
    main()
