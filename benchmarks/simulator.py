"""How fast a schedule is built, proven and timed: ours, a plain Python loop, simpy and the limit, in one run.

    python -m benchmarks.simulator            the table
    python -m benchmarks.simulator --large    also ten million compute actions

Ours includes building, lowering and checking; the peers only run (the plain loop's building is shown apart). An action
is one entry of the lowered list: compute, send, receive or update. The limit is what writing the result takes: the
lowered list and the two times of every action, at the speed this machine copies memory. CPU seconds, repetitions
interleaved, medians. All three must agree on the makespan.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

import numpy as np

from benchmarks import plain_loop, simpy_loop
from penstock import schedule, simulate

SECONDS = {"F": 1.0, "B": 2.0}
TRANSFER = 0.125
BYTES = 21 + 16  # of one lowered action, and of its start and end


def cpu(work, *arguments):
    begin = time.process_time()
    result = work(*arguments)
    return time.process_time() - begin, result


def ours(p, m):
    return simulate(schedule("1f1b", stages=p, microbatches=m), transfer=TRANSFER)


def copy_seconds(size):
    """CPU seconds to write `size` bytes that are in memory already."""
    source, target = np.zeros(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
    np.copyto(target, source)
    return cpu(np.copyto, target, source)[0]


def case(p, m, repetitions):
    """One line of the table: nanoseconds an action."""
    spent = {name: [] for name in ("ours", "build", "plain", "simpy", "limit")}
    ours(p, m)
    for _ in range(repetitions):
        seconds, line = cpu(ours, p, m)
        actions = len(line.schedule)
        spent["ours"].append(seconds)
        seconds, slots = cpu(plain_loop.build, p, m)
        spent["build"].append(seconds)
        seconds, times = cpu(plain_loop.simulate, slots, SECONDS, TRANSFER)
        spent["plain"].append(seconds)
        seconds, end = cpu(simpy_loop.simulate, slots, SECONDS, TRANSFER)
        spent["simpy"].append(seconds)
        spent["limit"].append(copy_seconds(actions * BYTES))
        last = max(end for slot in times for _, end in slot)
        assert abs(line.makespan - last) < 1e-6 * last
        assert abs(line.makespan - end) < 1e-6 * last
    ns = {name: statistics.median(values) / actions * 1e9 for name, values in spent.items()}
    print(
        f"1f1b p={p:<3} m={m:<6} {actions:>9} actions   ours {ns['ours']:6.0f}   plain loop {ns['plain']:6.0f} "
        f"(+ {ns['build']:.0f} to build)   simpy {ns['simpy']:6.0f}   limit {ns['limit']:4.0f}   "
        f"plain / ours {ns['plain'] / ns['ours']:5.1f}x   simpy / ours {ns['simpy'] / ns['ours']:5.0f}x"
    )


def large():
    """Ten million compute actions: time, and the most memory the process ever had."""
    seconds, line = cpu(ours, 64, 78_125)
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    compute = int(line.schedule.is_compute().sum())
    print(
        f"1f1b p=64  m=78125  {len(line.schedule):>9} actions, {compute} of them compute   "
        f"ours {seconds / len(line.schedule) * 1e9:.0f}   {seconds:.1f} CPU seconds in all, peak {gib:.1f} GiB"
    )


def cold(*arguments):
    """CPU seconds of a command from a cold start."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "penstock.cli", *arguments], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"penstock {' '.join(arguments):<70} {statistics.median(spent):.2f} CPU seconds, cold")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--large", action="store_true", help="also ten million compute actions")
    options.add_argument("--repetitions", type=int, default=3)
    chosen = options.parse_args()
    print("nanoseconds an action, CPU time, medians")
    for p, m in ((4, 25_000), (8, 25_000), (32, 6_000)):
        case(p, m, chosen.repetitions)
    if chosen.large:
        large()
    cold("--help")
    cold("simulate", "--schedule", "1f1b", "--stages", "8", "--microbatches", "32", "--json")
    cold("simulate", "--schedule", "zb-v", "--stages", "4", "--microbatches", "8")


if __name__ == "__main__":
    main()
