"""Text for actions, slots and numbers, for all reports."""

from __future__ import annotations

import math
import re

import numpy as np

from penstock.core.action import Op
from penstock.core.memory import MemoryKind
from penstock.core.shape import IntArray, Shape
from penstock.core.timeline import Timeline

WORDS: dict[Op, str] = {
    Op.F: "forward",
    Op.B: "full backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.FB: "forward and backward overlapped",
    Op.SEND_F: "activations sent",
    Op.RECV_F: "wait for activations",
    Op.SEND_B: "gradients sent",
    Op.RECV_B: "wait for gradients",
    Op.REDUCE: "reduction over replicas",
    Op.UPDATE: "weight update",
    Op.UNSHARD: "parameters gathered",
    Op.RESHARD: "parameters dropped",
}

LETTERS: dict[Op, str] = {
    **{Op.F: "F", Op.B: "B", Op.I: "I", Op.W: "W", Op.FB: "F&B", Op.SEND_F: "F", Op.RECV_F: "F", Op.SEND_B: "B"},
    **{Op.RECV_B: "B", Op.REDUCE: "R", Op.UPDATE: "U", Op.UNSHARD: "G", Op.RESHARD: "D"},
}

KIND_WORDS: dict[MemoryKind, str] = {
    MemoryKind.WEIGHTS: "weights",
    MemoryKind.OPTIMIZER: "optimizer state",
    MemoryKind.VERSIONS: "older weight versions",
    MemoryKind.GRADIENTS: "gradients",
    MemoryKind.ACTIVATIONS: "activations",
    MemoryKind.HELD: "held for weight gradients",
    MemoryKind.RECOMPUTE: "recomputed activations",
}

# Characters that are invalid in XML, even escaped, and that a terminal should not receive: control characters and
# single surrogates.
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

MEMORY_IN_A = "in A: one rank's activations of one micro-batch"


def printable(text: str) -> str:
    """Return the text with a replacement character for every unprintable one."""
    return _UNPRINTABLE.sub("\ufffd", text)


def slot_label(shape: Shape, slot: int) -> str:
    """Return 'rank 2', or 'rank 2.1' for a replica of a rank that has several."""
    rank = int(shape.slot_rank[slot])
    return f"rank {rank}.{int(shape.slot_replica[slot])}" if shape.replicas[rank] > 1 else f"rank {rank}"


def slot_labels(shape: Shape) -> list[str]:
    return [slot_label(shape, slot) for slot in range(shape.slots)]


def chunk_of_stage(shape: Shape) -> IntArray:
    """Return the number of each stage among those of its rank, in model order."""
    counts = np.zeros(shape.ranks, dtype=np.int32)
    chunk = np.zeros(shape.stages, dtype=np.int32)
    for stage, rank in enumerate(shape.placement):
        chunk[stage] = counts[rank]
        counts[rank] += 1
    return chunk


def placed(shape: Shape) -> str:
    """Describe the placement of stages: 'one chunk a rank', '2 chunks a rank placed as a V', ..."""
    if shape.chunks == 1:
        return "one chunk a rank"
    down = tuple(range(shape.ranks))
    ways = {(*down, *reversed(down)): " placed as a V", down * shape.chunks: " interleaved"}
    return f"{shape.chunks} chunks a rank{ways.get(shape.placement, '')}"


def number(value: float) -> str:
    """Format a number with four digits, without trailing zeros, and without an exponent from 1e-6 up."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(digits, 9)}f}" if abs(value) >= 1e-6 else f"{value:.3g}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"


def seconds(value: float) -> str:
    """Format a time with a suitable unit."""
    size = abs(value)
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if size >= scale or (unit == "s" and size == 0):
            return f"{number(value / scale)} {unit}"
    return f"{number(value / 1e-9)} ns"


def in_bytes(timeline: Timeline) -> bool:
    """Return True if memory is in bytes, False if in A, the activations of one rank for one micro-batch.

    Costs given as a few numbers have activations only; costs of a model, and measured memory, include weights.
    """
    memory = timeline.memory
    if memory is None or timeline.measured:
        return True
    return any(
        bool(memory.standing[kind].any())
        for kind in (MemoryKind.WEIGHTS, MemoryKind.OPTIMIZER)
        if kind in memory.standing
    )


def amount(value: float, bytes_: bool) -> str:
    """Format an amount of memory."""
    if not bytes_:
        return f"{number(value)} A"
    for unit, scale in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if abs(value) >= scale:
            return f"{number(value / scale)} {unit}"
    return f"{number(value)} B"


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"
