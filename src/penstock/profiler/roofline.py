"""Seconds of counted work on a device: each operator is limited by arithmetic or by memory.

    seconds = max(operations / (peak x efficiency), bytes / (bandwidth x efficiency)) + launch

The efficiency grows with the size of the kernel: share · t / (t + ramp), where t is the time of its work at the share
that large kernels reach.
"""

from __future__ import annotations

import torch

from penstock.profiler.counting import Work
from penstock.profiler.devices import Machine
from penstock.profiler.operations import OperatorCall, OperatorKind

_ARITHMETIC = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
}


def seconds(machine: Machine, work: Work) -> float:
    """Return the seconds of all operators, one kernel after another."""
    return sum(seconds_of(machine, one) * times for one, times in work.items())


def seconds_of(machine: Machine, one: OperatorCall) -> float:
    roof = machine.compute_roof(arithmetic(one), attention=one.kind is OperatorKind.ATTENTION)
    return max(roof.seconds(one.flops), machine.memory_roof.seconds(one.bytes)) + machine.launch


def arithmetic(one: OperatorCall) -> str:
    """Return the arithmetic of a call: by default torch rounds fp32 to tf32 in convolutions, but not in products."""
    if one.kind is OperatorKind.CONVOLUTION and one.dtype is torch.float32:
        return "tf32"
    return _ARITHMETIC.get(one.dtype, "fp32")
