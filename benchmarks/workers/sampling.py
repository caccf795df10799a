"""Times of all contenders, interleaved, without the samples that somebody else disturbed.

Two signs of a disturbance: cores that were busy with other processes (`penstock.profiler.quiet`), and cores that were
slower or faster than they usually were in this run, as a fixed piece of work just before and after the step tells:
neighbours on the same physical machine show only so, and where they always are, the fastest moments are the odd ones.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field

from penstock.profiler.quiet import quiet_sample

SOON = 0.01  # seconds from the word to the start: long enough that it has reached every rank
ODD = 1.10  # a probe that takes this much longer or shorter than the run's median says that the core was not itself


@dataclass(frozen=True)
class Sample:
    """One step of one contender: seconds from the common start to the last rank's end."""

    seconds: float
    cpu: float  # of all ranks together
    alone: bool  # nobody else had the cores
    probe: float
    told: list

    @classmethod
    def of(cls, before, laps, alone):
        """From the probes before a step, and each rank's lap."""
        probe = max(early + lap.probe for early, lap in zip(before, laps, strict=True))
        seconds, cpu = max(lap.seconds for lap in laps), sum(lap.cpu for lap in laps)
        return cls(seconds, cpu, alone, probe, [lap.told for lap in laps])


@dataclass
class Samples:
    """Of one contender."""

    speed: Speed
    all: list[Sample] = field(default_factory=list)

    @property
    def quiet(self):
        return [sample for sample in self.all if sample.alone and self.speed.was_usual(sample.probe)]

    @property
    def used(self):
        """Where nothing was quiet, what there is: the table says so."""
        return self.quiet or self.all

    @property
    def seconds(self):
        return statistics.median(sample.seconds for sample in self.used)

    def told(self, rank, what):
        return statistics.median(sample.told[rank][what] for sample in self.used)

    def to_json(self):
        kept = self.quiet
        noisy = [sample.seconds for sample in self.all if sample not in kept]
        cpu = statistics.median(sample.cpu for sample in self.used)
        quiet = [sample.seconds for sample in kept]
        return {"median": self.seconds, "cpu": cpu, "quiet": quiet, "noisy": noisy}


@dataclass
class Speed:
    """All probes of a run."""

    probes: list[float] = field(default_factory=list)

    @property
    def usual(self):
        return statistics.median(self.probes)

    def was_usual(self, probe):
        return not probe or self.usual / ODD <= probe <= self.usual * ODD


def one(team, name):
    """A sample: the ranks get ready, then begin together."""
    with quiet_sample() as around:
        before = team.ask("prepare", name)
        laps = team.ask("step", name, time.perf_counter() + SOON)
    return Sample.of(before, laps, around.quiet)


def collect(team, names, repetitions, patience=2):
    """That many quiet samples of every contender, or what `patience` times as many rounds give."""
    speed, dice = Speed(), random.Random(0)
    found = {name: Samples(speed) for name in names}
    for name in names:  # warm: buffers, shapes, pages
        one(team, name)
    for turn in range(patience * repetitions):
        wanted = [name for name in names if turn < repetitions or len(found[name].quiet) < repetitions]
        for name in dice.sample(wanted, len(wanted)):
            found[name].all.append(one(team, name))
            speed.probes.append(found[name].all[-1].probe)
    return found
