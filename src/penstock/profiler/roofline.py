"""Seconds of counted work on a device: each operator runs against the nearer of two roofs, arithmetic and memory.

    seconds = max(operations / (peak x efficiency), bytes / (bandwidth x efficiency)) + launch

The efficiency grows with the size of the kernel: share · t / (t + ramp), where t is what its work takes at the share
that large kernels reach.
"""

from __future__ import annotations

import torch

from penstock.profiler.counting import Work
from penstock.profiler.devices import Machine
from penstock.profiler.operations import Kind, Operation

_ARITHMETIC = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
}


def seconds(machine: Machine, work: Work) -> float:
    """All of it, one kernel after another."""
    return sum(seconds_of(machine, one) * times for one, times in work.items())


def seconds_of(machine: Machine, one: Operation) -> float:
    roof = machine.compute_roof(arithmetic(one), attention=one.kind is Kind.ATTENTION)
    return max(roof.seconds(one.flops), machine.memory_roof.seconds(one.bytes)) + machine.launch


def arithmetic(one: Operation) -> str:
    """What computes it: torch lets convolutions of fp32 round to tf32, and products not, unless it is told."""
    if one.kind is Kind.CONVOLUTION and one.dtype is torch.float32:
        return "tf32"
    return _ARITHMETIC.get(one.dtype, "fp32")
