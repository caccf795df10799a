"""Contenders on one rank, each with a step that can be timed."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


class Lap(NamedTuple):
    """One rank's part of one step. All clocks of one host are one."""

    seconds: float  # from the common start to this rank's end
    cpu: float  # seconds, of all threads of the rank
    told: dict | None  # by the contender
    probe: float  # seconds of fixed work just after: the speed of the core at that time


class Contest:
    """What the conductor asks of a rank; subclasses make the contenders and choose how much work a probe is."""

    products = 0

    def __init__(self, contenders):
        self.contenders = contenders
        self.factors = [torch.randn(512, 512) for _ in range(3)]

    def names(self):
        return list(self.contenders)

    def prepare(self, name):
        """The gradients of the last step go; returns the seconds of the probe."""
        self.contenders[name].zero()
        return self._probe()

    def step(self, name, start):
        """All ranks begin at one moment: what a barrier lets go, it lets go milliseconds apart."""
        contender = self.contenders[name]
        time.sleep(max(0.0, start - time.perf_counter()))
        used = time.process_time()
        told = contender.step()
        end = time.perf_counter()
        return Lap(end - start, time.process_time() - used, told, self._probe())

    def close(self):
        """The end: what runs without a flush is drained, by all ranks in the same order."""
        for contender in self.contenders.values():
            if hasattr(contender, "records"):
                contender.records.close()

    def loss(self, name):
        return self.contenders[name].loss()

    def held(self, name):
        return self.contenders[name].held()

    def slots(self, name):
        return self.contenders[name].slots()

    def _probe(self):
        left, right, product = self.factors
        begin = time.perf_counter()
        for _ in range(self.products):
            torch.mm(left, right, out=product)
        return time.perf_counter() - begin
