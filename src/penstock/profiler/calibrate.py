"""Measure the throughput of kernels on this device: matrix products, attention, elementwise work, and launches.

A product of n operations takes n / rate + ramp + launch: the peak is the best rate of several sizes, and the ramp is
the time that a small one takes beyond it. Bandwidth is that of a large copy; the memory share is the mean that
elementwise kernels and norms reach of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, median

import torch
import torch.nn.functional as F

from penstock.profiler.devices import ARITHMETICS, MACHINES, Machine

SHORTEST = 5e-3  # least seconds of a round
LONGEST = 0.5  # approximate limit of seconds of a call
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Run = Callable[[], object]


def calibrate(
    progress: Callable[[str], None] = lambda what: None, clock: Callable[[], float] = time.perf_counter
) -> Machine:
    """Measure this device: the first GPU, or the CPU with torch's number of threads."""
    device = _MeasuredDevice(torch.device("cuda" if torch.cuda.is_available() else "cpu"), clock)
    peaks: dict[str, float] = {}
    ramps: list[float] = []
    with torch.no_grad():
        progress("launches")
        device.find_launch()
        for name, dtype in DTYPES.items():
            progress(f"products in {name}")
            peaks[name], ramp = device.products(dtype)
            ramps.append(ramp)
        peaks["tf32"] = device.tf32() if device.gpu else peaks["fp32"]
        progress("attention")
        common = "bf16" if device.gpu else "fp32"
        attention = min(1.0, device.attention(DTYPES[common]) / peaks[common])
        progress("memory")
        bandwidth, share, ramp = device.memory()
    ordered = {name: peaks[name] for name in ARITHMETICS}
    return Machine(device.kind(), ordered, bandwidth, device.launch, 1.0, median(ramps), attention, share, ramp)


class _MeasuredDevice:
    """The device that is measured."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self.device, self.clock, self.gpu = device, clock, device.type == "cuda"
        self.launch = 0.0

    def kind(self) -> str:
        """Return penstock's name of the device, or the vendor's."""
        if not self.gpu:
            return "cpu"
        facts = torch.cuda.get_device_properties(self.device)
        words = facts.name.lower().replace("-", " ").split()
        near = [kind for kind in MACHINES if kind.split("-")[0] in words and (kind != "rtx-4090" or "4090" in words)]
        return min(near, key=lambda kind: abs(MACHINES[kind].memory - facts.total_memory), default="-".join(words))

    def seconds(self, run: Run) -> float:
        """Return the seconds of one call, averaged over many, less its launch, in the best of five rounds: other
        processes can only slow it down."""
        run()
        times, rounds = 1, [self._round(run, 1)]
        while rounds[-1] < SHORTEST:
            times *= 4
            rounds = [self._round(run, times)]
        rounds += [self._round(run, times) for _ in range(4)]
        return max(min(rounds) / times - self.launch, 1e-9)

    def _round(self, run: Run, times: int) -> float:
        self._wait()
        start = self.clock()
        for _ in range(times):
            run()
        self._wait()
        return self.clock() - start

    def _wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def find_launch(self) -> None:
        x = torch.zeros(1, device=self.device)
        self.launch = self.seconds(lambda: x.add_(1))

    def products(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the best rate of square products, and the additional seconds of a small one."""
        seconds_by_work: dict[int, float] = {}
        for n in (512, 2048, 8192) if self.gpu else (64, 256, 1024):
            duration = seconds_by_work[2 * n**3] = self._product(torch.ones(n, n, dtype=dtype, device=self.device))
            if 4**3 * duration > LONGEST:  # the next size takes 64 times as long
                break
        rate, small = max(work / seconds for work, seconds in seconds_by_work.items()), min(seconds_by_work)
        return rate, max(seconds_by_work[small] - small / rate, 0.0)

    def _product(self, square: torch.Tensor) -> float:
        return self.seconds(lambda: square @ square)

    def tf32(self) -> float:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return self.products(torch.float32)[0]
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    def attention(self, dtype: torch.dtype) -> float:
        length = 4096 if self.gpu else 512
        q = torch.ones(2, 8, length, 64, dtype=dtype, device=self.device)
        return 4 * 2 * 8 * length**2 * 64 / self.seconds(lambda: F.scaled_dot_product_attention(q, q, q))

    def memory(self) -> tuple[float, float, float]:
        """Return the bytes/s of a copy, the share of it that other kernels reach, and the additional seconds of a small
        copy."""
        x = torch.ones(2**14 if self.gpu else 2**11, 2048, device=self.device)
        y, few = torch.empty_like(x), x[:8].clone()
        spare, moved = few.clone(), 2 * x.numel() * x.element_size()
        bandwidth = moved / self.seconds(lambda: y.copy_(x))
        runs: tuple[Run, ...] = (
            lambda: torch.add(x, 1.0, out=y),
            lambda: F.gelu(x),
            lambda: F.layer_norm(x, (2048,)),
            lambda: torch.softmax(x, -1),
        )
        share = mean(moved / self.seconds(run) for run in runs) / bandwidth
        small = 2 * few.numel() * few.element_size()
        ramp = self.seconds(lambda: spare.copy_(few)) - small / bandwidth
        return bandwidth, min(1.0, share), max(ramp, 0.0)
