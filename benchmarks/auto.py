"""What `auto` gains: its makespan, that of the best named method that fits, and a bound that nothing can beat.

    python -m benchmarks.auto            eight sets of costs a class
    python -m benchmarks.auto --sets 40

A class is a placement and a memory cap, in activations of one micro-batch on one of p ranks. Costs are drawn anew for
every set: p 4 to 8, m 8 to 32, seconds of F, I and W between 1 and 2 on every rank, transfers up to 0.2. The three
makespans are means over the sets, in units of the busiest rank's work, so 1 is a step without idle time. `named` and
`won` (ours is shorter, of how many) leave out the sets in which no named method fits. `gap` is the mean of
ours / bound - 1: what is left to gain at most.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from random import Random

from penstock import InputError, schedule
from penstock.core.cost import flat_costs
from penstock.schedules.auto.bound import lower_bound
from penstock.simulator.simulate import simulate_costs

NAMED = {
    "straight": ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "dapple", "dapple pb"),
    "v": ("zb-v", "dualpipe-v"),
    "interleaved": ("interleaved",),
}
CAPS = {"any": lambda p: math.inf, "2p": lambda p: 2.0 * p, "p": float, "(p+1)/2": lambda p: (p + 1) / 2}


def draw(random, placement):
    p, m = random.randint(4, 8), random.randint(8, 32)
    m = -(-m // p) * p if placement == "interleaved" else m
    kinds = ("forward", "input_grad", "weight_grad")
    numbers = {kind: [random.uniform(1, 2) for _ in range(p)] for kind in kinds}
    return p, m, numbers | {"transfer": [random.uniform(0, 0.2) for _ in range(p)]}


def named(placement, frame, numbers, cap):
    """The best makespan of a named method that fits, infinite where none does."""
    best = math.inf
    for name in NAMED[placement]:
        method, _, policy = name.partition(" ")
        options = {"cap": max(1, int(min(cap, frame["microbatches"])))} if method == "dapple" else {}
        try:
            built = schedule(method, **frame, **options, **({"policy": policy} if policy else {}))
        except InputError:  # a number of micro-batches that the method does not take
            continue
        line = simulate_costs(built, flat_costs(built.shape, **numbers))
        if (line.peak_activations <= cap + 1e-9).all():
            best = min(best, line.makespan)
    return best


def one_set(random, placement, rule):
    """Ours, best named and bound over the busiest rank's work, and the seconds that the search took."""
    p, m, numbers = draw(random, placement)
    cap = rule(p)
    frame = {"stages": p, "microbatches": m, "chunks": 1 if placement == "straight" else 2}
    begin = time.process_time()
    built = schedule("auto", **frame, placement=placement, memory=cap, **numbers)
    spent = time.process_time() - begin
    costs = flat_costs(built.shape, **numbers)
    line = simulate_costs(built, costs)
    work = line.work.max()
    best = named(placement, frame, numbers, cap)
    return line.makespan / work, best / work, lower_bound(built.shape, costs, cap) / work, spent


def main():
    parser = argparse.ArgumentParser(description="auto, the best named method and the bound, by class of case")
    parser.add_argument("--sets", type=int, default=8, help="sets of costs a class")
    sets = parser.parse_args().sets
    print(f"{'placement':<12} {'memory':>8} {'ours':>7} {'named':>7} {'bound':>7} {'won':>7} {'gap':>7} {'seconds':>8}")
    gaps, won, met = [], 0, 0
    for placement in NAMED:
        for cap, rule in CAPS.items():
            random = Random(f"{placement} {cap}")
            rows = [one_set(random, placement, rule) for _ in range(sets)]
            better = sum(ours * (1 + 1e-9) < best < math.inf for ours, best, *_ in rows)
            fitting = [best for _, best, *_ in rows if best < math.inf]
            gap = [ours / bound - 1 for ours, _, bound, _ in rows]
            ours, bound, spent = (statistics.mean(row[at] for row in rows) for at in (0, 2, 3))
            beside = f"{statistics.mean(fitting):7.4f}" if fitting else "   none"
            print(
                f"{placement:<12} {cap:>8} {ours:7.4f} {beside} {bound:7.4f} {better:>3}/{len(fitting):<3}"
                f" {statistics.mean(gap):7.2%} {spent:8.2f}",
                flush=True,
            )
            gaps, won, met = gaps + gap, won + better, met + len(fitting)
    print(f"better than every named method in {won} of the {met} sets in which one fits")
    print(f"mean gap to the bound over all {len(gaps)} sets: {statistics.mean(gaps):.2%}")


if __name__ == "__main__":
    main()
