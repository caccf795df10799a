"""All-reduce between processes of one host: ours, gloo's and the limit, in one run.

    python -m benchmarks.reductions [--repetitions 9] [--ranks 2 4] [--sizes 1 16 64]

One line a size and number of ranks: the time in which all ranks have the sum of one float32 tensor of so many MB, one
sum after the other; a sample is from a common start to the last rank's end. gloo's is `torch.distributed.all_reduce`.
The limit moves what a sum cannot do without, at the speed of plain copies, by all ranks at once: a rank of n writes
(n - 1) / n of its tensor for others to read, reads n shares of 1 / n, and writes the whole sum; that is one copy of
half of these bytes. Core time, all that a rank's threads have used, tells on a busy machine, too. Medians; repetitions
interleaved in shuffled order; those in which other processes used the cores are made again, and where there was no
quiet, that is said. One thread a process.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.workers.team import Team
from penstock.comm.collectives.open import open_reducer
from penstock.comm.world.world import join
from penstock.profiler.quiet import quiet_sample

WAYS = ("ours", "gloo", "limit")
WANTED = 2.0  # times as fast as gloo
TRIES = 4  # for a quiet sample
LEAD = 0.005  # seconds between the word to all ranks and their common start


class Reducing:
    """One rank."""

    def __init__(self, rank):
        self.world = join(60)
        self.reducer = open_reducer(self.world, tuple(range(self.world.size)), torch.device("cpu"))

    def prepare(self, size):
        """A tensor of so many MB; the sum is checked once."""
        n = self.world.size
        self.tensor = torch.full((size << 18,), self.world.rank + 1.0)
        self.reducer.start([self.tensor]).wait()
        good = bool((self.tensor == n * (n + 1) / 2).all())
        self.tensor.zero_()  # which stays as it is
        bytes_moved = self.tensor.nbytes * ((n - 1) / n + 1 + 1) / 2
        self.from_here, self.to_there = (torch.zeros(int(bytes_moved) // 4) for _ in range(2))
        return good

    def seconds(self, way, start, count):
        """Return those of one of so many, from the common start to this rank's end; and of this rank's cores."""
        play = getattr(self, way)
        time.sleep(max(0.0, start - time.perf_counter()))
        used = time.process_time()
        for _ in range(count):
            play()
        return (time.perf_counter() - start) / count, (time.process_time() - used) / count

    def ours(self):
        self.reducer.start([self.tensor]).wait()

    def gloo(self):
        dist.all_reduce(self.tensor)

    def limit(self):
        self.to_there.copy_(self.from_here)

    def close(self):
        self.reducer.close()


def sample(team, way, count):
    """Seconds until the last rank has ended, and of cores that a rank has used."""
    seconds, used = zip(*team.ask("seconds", way, time.perf_counter() + LEAD, count), strict=True)
    return max(seconds), statistics.mean(used)


def case(team, size, repetitions, seconds):
    """Medians by way, and the fewest quiet samples that one has."""
    assert all(team.ask("prepare", size))
    quiet = {way: [] for way in WAYS}
    loud = {way: [] for way in WAYS}
    counts = {way: int(seconds / min(sample(team, way, 3)[0] for _ in range(3))) + 1 for way in WAYS}
    for _ in range(TRIES * repetitions):
        for way in random.sample(WAYS, len(WAYS)):
            if len(quiet[way]) < repetitions:
                with quiet_sample() as heard:
                    spent = sample(team, way, counts[way])
                (quiet if heard.quiet else loud)[way].append(spent)
    medians = {way: [statistics.median(each) for each in zip(*(quiet[way] or loud[way]), strict=True)] for way in WAYS}
    return medians, min(map(len, quiet.values()))


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repetitions", type=int, default=9, help="quiet samples of each")
    options.add_argument("--seconds", type=float, default=0.3, help="that a sample lasts")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64], help="MB (2^20 bytes)")
    chosen = options.parse_args()
    for ranks in chosen.ranks:
        with Team(ranks, Reducing) as team:
            for size in chosen.sizes:
                found, fewest = case(team, size, chosen.repetitions, chosen.seconds)
                (ours, own), (gloo, other), (limit, _) = ([1e3 * seconds for seconds in found[way]] for way in WAYS)
                noise = "" if fewest == chosen.repetitions else f"   NOISY: {fewest} quiet samples"
                print(
                    f"{ranks} ranks  {size:3} MB   ours {ours:7.2f} ms   gloo {gloo:7.2f} ms   limit {limit:7.2f} ms  "
                    f" gloo / ours {gloo / ours:.2f} (wanted {WANTED:.2f})   ours / limit {ours / limit:.2f}   "
                    f"core time a rank: ours {own:.2f} ms, gloo {other:.2f} ms{noise}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
