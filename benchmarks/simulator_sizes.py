"""Microseconds an action of a simulation against its size, from 4 x 4 to 64 x 4,096 stages x micro-batches of 1F1B.

    python -m benchmarks.simulator_sizes                                     the table
    python -m benchmarks.simulator_sizes docs/pictures/simulator-sizes.svg   also the picture

*In a loop* is one call after many others: `simulate` of a schedule that is there, which lowers, checks and times it;
and the same with the schedule built each time. *First call* is the only one of a new process, its imports left out:
below some thousand actions plain Python, above them with the loading of compiled code from disk. The plain loop is
that of `benchmarks/plain_loop.py`, building included; it checks nothing. CPU seconds, medians over rounds in which
every size and every line takes its turn.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from math import ceil, log10
from pathlib import Path

from benchmarks import plain_loop
from benchmarks.simulator import SECONDS, TRANSFER, cpu
from benchmarks.study.chart import Axis, Series, chart
from penstock import schedule, simulate

SIZES = ((4, 4), (4, 8), (8, 16), (8, 32), (16, 64), (32, 128), (32, 512), (64, 1024), (64, 4096))
LINES = {
    "loop": ("simulate, in a loop", "#1a9a70", ""),
    "built": ("the same, and built", "#1a9a70", "7 4"),
    "first": ("first call of a process", "#2b6fb3", "2 3"),
    "plain": ("plain loop, no checks", "#c75f00", ""),
}
LEAST = 50_000  # actions that are timed together, so that the clock's own grain is small

FIRST = """
import sys, time
from penstock import schedule, simulate
import penstock.simulator.simulate
built = schedule("1f1b", stages=int(sys.argv[1]), microbatches=int(sys.argv[2]))
begin = time.process_time()
simulate(built, transfer=float(sys.argv[3]))
print(time.process_time() - begin)
"""


def repeated(times, work):
    """CPU seconds of one of so many calls."""
    return cpu(lambda: [work() for _ in range(times)] and None)[0] / times


def plain(p, m):
    return plain_loop.simulate(plain_loop.build(p, m), SECONDS, TRANSFER)


def first(p, m):
    """CPU seconds of the first simulation of a new process."""
    command = [sys.executable, "-c", FIRST, str(p), str(m), str(TRANSFER)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure(rounds):
    """Microseconds an action by line and size, and the actions of every size."""
    made = {size: schedule("1f1b", stages=size[0], microbatches=size[1]) for size in SIZES}
    actions = {size: len(simulate(built, transfer=TRANSFER).schedule) for size, built in made.items()}
    spent = {line: {size: [] for size in SIZES} for line in LINES}
    for _ in range(rounds):
        for size, built in made.items():
            times = ceil(LEAST / actions[size])
            p, m = size
            works = {
                "loop": lambda built=built: simulate(built, transfer=TRANSFER),
                "built": lambda p=p, m=m: simulate(schedule("1f1b", stages=p, microbatches=m), transfer=TRANSFER),
                "plain": lambda p=p, m=m: plain(p, m),
            }
            for line, work in works.items():
                spent[line][size].append(repeated(times, work))
            spent["first"][size].append(first(*size))
    found = {
        line: {size: statistics.median(seconds) / actions[size] * 1e6 for size, seconds in by_size.items()}
        for line, by_size in spent.items()
    }
    return found, actions


def show(found, actions):
    print("CPU microseconds an action, medians\n")
    print("| stages x micro-batches | actions | " + " | ".join(name for name, _, _ in LINES.values()) + " |")
    print("|---" * (2 + len(LINES)) + "|")
    for size in SIZES:
        figures = " | ".join(f"{found[line][size]:.3g}" for line in LINES)
        print(f"| {size[0]} x {size[1]:,} | {actions[size]:,} | {figures} |")
    whole = found["loop"][4, 8] * actions[4, 8] / 1e3
    print(f"\n1,000 calls of 4 x 8 in a loop: {whole:.2f} CPU seconds")


def draw(found, actions):
    """Both axes count powers of ten."""
    across = [log10(actions[size]) for size in SIZES]
    every = [log10(value) for by_size in found.values() for value in by_size.values()]
    tens = range(ceil(across[0]), ceil(across[-1]) + 1)
    x = Axis("actions, transfers included", across[0], across[-1] + 0.1, list(tens)[:-1], [f"{10**n:,}" for n in tens])
    low, high = -2, ceil(max(every))
    steps = range(low, high + 1)
    y = Axis("microseconds an action", low, high, list(steps), [f"{10.0**n:g}" for n in steps])
    series = [
        Series(name, [(log10(actions[size]), log10(found[line][size])) for size in SIZES], colour, dash, marks=True)
        for line, (name, colour, dash) in LINES.items()
    ]
    return chart("Simulating 1F1B, from 4 x 4 to 64 x 4,096", x, y, series)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("picture", nargs="?", type=Path, help="an SVG to write")
    options.add_argument("--rounds", type=int, default=5)
    chosen = options.parse_args()
    found, actions = measure(chosen.rounds)
    show(found, actions)
    if chosen.picture is not None:
        chosen.picture.write_text(draw(found, actions))


if __name__ == "__main__":
    main()
