"""Contenders on one rank, each with a step that can be timed."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist


class Lap(NamedTuple):
    """One rank's part of one step. All clocks of one host are one."""

    begin: float
    end: float
    cpu: float  # seconds, of all threads of the rank
    told: dict | None  # by the contender
    probe: float  # seconds of fixed work just before and after: the speed of the core at that time


class Contest:
    """What the conductor asks of a rank; subclasses make the contenders and choose how much work a probe is."""

    products = 0

    def __init__(self, contenders):
        self.contenders = contenders
        self.factors = [torch.randn(512, 512) for _ in range(3)]

    def names(self):
        return list(self.contenders)

    def step(self, name):
        """All ranks begin together, with the gradients of the last step gone."""
        contender = self.contenders[name]
        contender.zero()
        probe = self._probe()
        dist.barrier()
        used, begin = time.process_time(), time.perf_counter()
        told = contender.step()
        end = time.perf_counter()
        return Lap(begin, end, time.process_time() - used, told, probe + self._probe())

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
