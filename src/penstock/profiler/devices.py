"""Devices by name: their peak throughput, from the vendors' data sheets, and the share of it that kernels reach.

Peaks are dense (no sparsity), in operations a second. The shares are those of large kernels in common libraries, the
same for all GPUs: round figures, which a calibration replaces by measured ones. Memory sizes come from the cluster
presets.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from penstock.core.cluster_presets import KINDS
from penstock.errors import InputError

ARITHMETICS = ("fp64", "fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class Roof:
    """A limit of a device: the peak throughput, the share that large kernels reach, and the ramp in seconds. A kernel
    whose work takes as long as the ramp reaches half of the share."""

    peak: float
    share: float
    ramp: float

    def seconds(self, work: float) -> float:
        return work / (self.peak * self.share) + self.ramp if work else 0.0

    def efficiency(self, work: float) -> float:
        """Return the share of the peak that a kernel of this size reaches: share · t / (t + ramp), t being its seconds
        at `share`."""
        return work / (self.peak * self.seconds(work)) if work else 0.0


@dataclass(frozen=True)
class Machine:
    """The figures of a device that determine the time of an operator."""

    kind: str
    peaks: dict[str, float]  # operations a second, by arithmetic
    bandwidth: float  # bytes a second
    launch: float = 5e-6  # seconds from one kernel to the next
    matmul_share: float = 0.75
    matmul_ramp: float = 4e-6  # seconds
    attention_share: float = 0.5  # products and softmax alternate
    memory_share: float = 0.85
    memory_ramp: float = 1e-6  # seconds

    @property
    def memory(self) -> float:
        """Bytes of memory; infinite where unknown."""
        return KINDS.get(self.kind, {}).get("memory", float("inf"))

    @property
    def memory_roof(self) -> Roof:
        return Roof(self.bandwidth, self.memory_share, self.memory_ramp)

    def compute_roof(self, arithmetic: str, attention: bool = False) -> Roof:
        share = self.attention_share if attention else self.matmul_share
        return Roof(self.peaks[arithmetic], share, self.matmul_ramp)


def _peaks(fp64: float, fp32: float, tf32: float, bf16: float, fp16: float) -> dict[str, float]:
    return dict(zip(ARITHMETICS, (fp64, fp32, tf32, bf16, fp16), strict=True))


# NVIDIA V100 data sheet (SXM2), 2020: tensor cores take fp16 alone; bf16 is computed as fp32.
_V100 = _peaks(7.8e12, 15.7e12, 15.7e12, 15.7e12, 125e12)
# NVIDIA A100 data sheet (SXM), 2021: 1,555 GB/s with 40 GB, 2,039 GB/s with 80 GB.
_A100 = _peaks(19.5e12, 19.5e12, 156e12, 312e12, 312e12)
# NVIDIA H100 (SXM5) and H200 data sheets, 2023: sparse figures halved.
_HOPPER = _peaks(67e12, 67e12, 494.7e12, 989.4e12, 989.4e12)
# NVIDIA L40S data sheet, 2023; its fp64 is 1/64 of fp32.
_L40S = _peaks(1.43e12, 91.6e12, 183e12, 362e12, 362e12)
# NVIDIA Ada GPU architecture white paper, 2022, appendix: tensor cores that add up in fp32; fp64 is 1/64 of fp32.
_RTX_4090 = _peaks(1.29e12, 82.6e12, 82.6e12, 165.2e12, 165.2e12)
# One core with AVX2 at 3 GHz: 2 fused multiply-adds of 8 numbers a cycle. A placeholder: calibrate.
_CORE = _peaks(48e9, 96e9, 96e9, 96e9, 96e9)

MACHINES = {
    machine.kind: machine
    for machine in (
        Machine("v100-16", _V100, 900e9),
        Machine("v100-32", _V100, 900e9),
        Machine("a100-40", _A100, 1555e9),
        Machine("a100-80", _A100, 2039e9),
        Machine("h100", _HOPPER, 3.35e12),
        Machine("h200", _HOPPER, 4.8e12),
        Machine("l40s", _L40S, 864e9),
        Machine("rtx-4090", _RTX_4090, 1008e9),
        Machine("cpu", _CORE, 10e9, 3e-6, 0.8, 1e-6, 0.5, 0.8, 1e-6),
    )
}
SHORT = {"v100": "v100-32", "a100": "a100-80"}  # of kinds that come in two sizes, the larger


def full_name(name: str) -> str:
    return SHORT.get(str(name), str(name))


def machine_of(name: str) -> Machine:
    """Return a device by its name."""
    full = full_name(name)
    if full not in MACHINES:
        every = [*MACHINES, *SHORT]
        near = get_close_matches(str(name).lower(), every, n=3)
        advice = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(every)}"
        raise InputError("the name of a device", repr(name), advice)
    return MACHINES[full]
