"""The table: our pipeline beside PyTorch's and the ideal.

    python -m benchmarks.workers                     all cases
    python -m benchmarks.workers --quick             three repetitions
    python -m benchmarks.workers --only sleeping --json found.json
    python -m benchmarks.workers --peer-only         without ours

All contenders of a case live in the same processes, one a rank, one thread each, over gloo where they need it; their
steps are interleaved in shuffled order; a step lasts from the start, one moment for all ranks, to the last one's end.
Medians of the quiet samples. `limit` is the schedule's ideal: no transfer and no runtime takes any time.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from benchmarks.workers import blocks, buffers, flowing, sleeping
from benchmarks.workers.sampling import collect
from benchmarks.workers.table import HEAD
from benchmarks.workers.team import Team


def sleeping_cases(ours, repetitions):
    with Team(sleeping.RANKS, sleeping.Sleeping, ours) as team:
        found = collect(team, team.ask("names")[0], *repetitions)
        lines = [*sleeping.lines(found, ours), *buffers.lines(team, ours)]
        slots = f"; slots to a middle rank in all {buffers.in_all(team) / 2**20:.1f} MiB" if ours else ""
    late, bare = (max(found[who].told(rank, "F + B") for rank in range(sleeping.RANKS)) for who in ("naps", "bare"))
    asked = sleeping.FORWARD + sleeping.BACKWARD
    note = (
        f"a sleep of {asked * 1e3:.0f} ms lasts {late * 1e3:.2f} ms here, {late / asked:.3f} of the limit; in a "
        f"forward and a backward of autograd alone {bare * 1e3:.2f} ms, {bare / asked:.3f}: no pipeline can do better"
    )
    return lines, found, note + slots


def block_cases(ours, repetitions):
    with Team(blocks.RANKS, blocks.Blocks, ours) as team:
        names = team.ask("names")[0]
        found = collect(team, names, *repetitions)
        team.ask("agree", [name for name in names if name != "alone"])
    parts = ("F", "B", "I", "W")
    times = (f"{part} {max(found['alone'].told(rank, part) for rank in range(2)) * 1e3:.0f}" for part in parts)
    return list(blocks.lines(found, ours)), found, f"a stage alone, ms: {', '.join(times)}; all gradients agree"


def steady_cases(ours, repetitions):
    """Asynchronous methods on sleeping stages, while the pipe is full; without ours there is nothing to see."""
    if not ours:
        return [], {}, "asynchronous methods: the peer has none"
    with Team(sleeping.RANKS, flowing.SleepingFlow) as team:
        found = collect(team, team.ask("names")[0], *repetitions)
    naps, bare = (flowing.own_time(found, who) * 1e3 for who in ("naps", "bare"))
    own = f"a stage's own time for a micro-batch: {bare:.2f} ms by autograd alone, of which it sleeps {naps:.2f} ms"
    return (
        list(flowing.sleeping_lines(found)),
        found,
        f"one mini-batch, while the pipe is full, updates included; {own}",
    )


def flowing_cases(ours, repetitions):
    """The same on blocks, beside the peer's 1F1B."""
    if not ours:
        return [], {}, "asynchronous methods: the peer has none"
    with Team(blocks.RANKS, flowing.BlocksFlow) as team:
        found = collect(team, team.ask("names")[0], *repetitions)
    return list(flowing.block_lines(found)), found, "one mini-batch, while the pipe is full; updates on both sides"


CASES = {"sleeping": sleeping_cases, "blocks": block_cases, "steady": steady_cases, "flowing": flowing_cases}


def main(arguments=None):
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="three repetitions")
    options.add_argument("--repetitions", type=int, default=9, help="quiet samples of each")
    options.add_argument("--patience", type=int, default=2, help="rounds at most, as a multiple of the repetitions")
    options.add_argument("--only", choices=sorted(CASES), help="one set of processes")
    options.add_argument("--peer-only", action="store_true", help="without ours")
    options.add_argument("--json", type=Path, help="write all figures there")
    asked = options.parse_args(arguments)
    written, repetitions = {}, (3 if asked.quick else asked.repetitions, asked.patience)
    print(HEAD, flush=True)
    for name in [asked.only] if asked.only else CASES:
        lines, found, note = CASES[name](not asked.peer_only, repetitions)
        print("\n".join([*map(str, lines), note]), flush=True)
        samples = {who: samples.to_json() for who, samples in found.items()}
        written[name] = {"lines": [line.to_json() for line in lines], "samples": samples, "note": note}
    if asked.json:
        import torch

        where = {"torch": torch.__version__, "cores": os.cpu_count(), "repetitions": repetitions[0]}
        asked.json.write_text(json.dumps(where | {"cases": written}, indent=1) + "\n")


if __name__ == "__main__":
    main()
