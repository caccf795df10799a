"""The colours of operations and kinds of memory, for all reports.

The fills differ in lightness as well as in hue, so that they are distinct for colour-blind readers and in grey. They
are of medium lightness, for light and dark pages. A rank's later chunks are drawn paler.
"""

from __future__ import annotations

from penstock.core.action import Op
from penstock.core.memory import MemoryKind

DARK_INK, LIGHT_INK = "#10151c", "#ffffff"
PALEST = 0.5  # how far the last chunk of a rank is mixed with white

FILLS: dict[Op, str] = {
    Op.F: "#70b5f2",
    Op.B: "#e8881c",
    Op.I: "#f9de6c",
    Op.W: "#1a9a70",
    Op.FB: "#70b5f2",  # its lower half is drawn as a B
    Op.SEND_F: "#2b6fb3",
    Op.RECV_F: "#2b6fb3",
    Op.SEND_B: "#a85c14",
    Op.RECV_B: "#a85c14",
    Op.REDUCE: "#c86fa3",
    Op.UPDATE: "#6656c4",
    Op.UNSHARD: "#8b949e",
    Op.RESHARD: "#6b7480",
}

KIND_FILLS: dict[MemoryKind, str] = {
    MemoryKind.WEIGHTS: "#8b949e",
    MemoryKind.OPTIMIZER: "#6b7480",
    MemoryKind.VERSIONS: "#6656c4",
    MemoryKind.GRADIENTS: "#c86fa3",
    MemoryKind.ACTIVATIONS: "#70b5f2",
    MemoryKind.HELD: "#1a9a70",
    MemoryKind.RECOMPUTE: "#e8881c",
}

# Stacked from the bottom: constant kinds first, so that the curves above them keep their shape.
STACK: tuple[MemoryKind, ...] = tuple(KIND_FILLS)

Rgb = tuple[int, int, int]


def rgb(colour: str) -> Rgb:
    """Return the three parts of '#rrggbb', 0 to 255."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue


def shade(op: Op, chunk: int = 0, chunks: int = 1) -> str:
    """Return the fill of an operation on one of a rank's chunks."""
    pale = PALEST * chunk / max(chunks - 1, 1)
    return "#" + "".join(f"{round(part + (255 - part) * pale):02x}" for part in rgb(FILLS[op]))


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2, from 0 for black to 1 for white."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in _unit(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def ink(fill: str) -> str:
    """Return the text colour with the higher contrast to a fill."""
    return max((DARK_INK, LIGHT_INK), key=lambda colour: contrast(colour, fill))


def _unit(colour: str) -> list[float]:
    return [part / 255 for part in rgb(colour)]
