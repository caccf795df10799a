"""Charts of loss against samples and against time, side by side: one line per method, with the same colour in both.

Losses differ more between mini-batches than between methods, so each point is the mean of the last few mini-batches,
which are the same for all methods. Losses far above the initial ones are cut off at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, isfinite

import numpy as np

from penstock.core.links import FloatArray
from penstock.errors import InputError
from penstock.reports.axis import tick_step, ticks
from penstock.reports.describe import number
from penstock.reports.svg_parts import SHEET, element, text, text_width

# Of medium lightness, so that they are visible on light and dark backgrounds.
COLOURS = ("#2f7ed8", "#c96a12", "#1f8f5f", "#d2453d", "#8a5fd3", "#0f8ea0", "#c44f98", "#8d7a1c", "#6f7d8c", "#a0623f")
DASHES = ("", "7 4", "2 3")  # for more methods than colours
EDGE, HEAD, LEFT, HEIGHT, BELOW, ROW = 16, 40, 52, 300, 46, 20
SMOOTH = 25  # a point is the mean over 1/25 of a run
HEADROOM = 1.1  # top of the chart, relative to the highest first point
MOST = 600  # points of a line


@dataclass(frozen=True)
class LossCurve:
    """Losses of one method, and the number of samples and seconds at each."""

    name: str
    samples: Sequence[float]
    seconds: Sequence[float]
    losses: Sequence[float]


@dataclass(frozen=True)
class _Chart:
    """Position of one chart; x is samples or seconds up to `span`, y is loss from `low` to `high`."""

    left: float
    right: float
    top: float
    span: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return self.left + value / self.span * (self.right - self.left)

    def y(self, loss: float) -> float:
        share = (min(loss, self.high) - self.low) / (self.high - self.low)
        return self.top + HEIGHT * (1 - share)


def loss_chart(curves: Sequence[LossCurve], title: str, clock: str, width: int = 1200) -> str:
    """Return a standalone SVG document. `clock` labels the time axis: measured, or simulated."""
    drawn = [(at, curve) for at, curve in enumerate(curves) if any(map(isfinite, curve.losses))]
    if not drawn:
        raise InputError("at least one method with a finite loss to draw", "none", "train for some steps")
    legend, top = _legend([(at, curve.name) for at, curve in drawn], width)
    middle = (width + LEFT) / 2
    smoothed = {at: smooth(curve.losses) for at, curve in drawn}
    low, high = _range(list(smoothed.values()))
    by_samples = _Chart(LEFT, middle - LEFT, top, max(max(c.samples) for _, c in drawn) or 1.0, low, high)
    by_time = _Chart(middle, width - EDGE, top, max(max(c.seconds) for _, c in drawn) or 1.0, low, high)
    body = [
        *_axes(by_samples, _counts(by_samples.span), "samples"),
        *_axes(by_time, ticks(by_time.span, 6), f"time, {clock}"),
        *_lines(by_samples, drawn, smoothed, lambda curve: curve.samples),
        *_lines(by_time, drawn, smoothed, lambda curve: curve.seconds),
    ]
    height = top + HEIGHT + BELOW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" '
        f'viewBox="0 0 {width} {height:g}" role="img" aria-labelledby="loss-title">',
        element("title", f"{title}: loss against samples and against time, {clock}", id="loss-title"),
        f"<style>{sheet()}</style>",
        element("rect", class_="ground", x=0, y=0, width=width, height=height, rx=8),
        text(title, EDGE, 26, "name"),
    )
    return "\n".join((*head, *legend, *body, "</svg>\n"))


def sheet() -> str:
    """Return the style sheet, with a class for every line."""
    rules = [SHEET, ".line { fill: none; stroke-width: 1.8; stroke-linejoin: round }\n"]
    rules += [f".m{at} {{ stroke: {colour} }} .dot.m{at} {{ fill: {colour} }}\n" for at, colour in enumerate(COLOURS)]
    rules += [f".d{at} {{ stroke-dasharray: {dash} }}\n" for at, dash in enumerate(DASHES) if dash]
    return "".join(rules)


def smooth(losses: Sequence[float]) -> FloatArray:
    """Return the mean of each loss and some before it, up to the first loss that is not finite."""
    values = np.array(losses, dtype=np.float64)
    values = values[: next((at for at, loss in enumerate(values) if not isfinite(loss)), len(values))]
    window = max(1, len(losses) // SMOOTH)
    total = np.concatenate(([0.0], np.cumsum(values)))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    return (total[last] - total[first]) / (last - first)


def _range(losses: list[FloatArray]) -> tuple[float, float]:
    """Return the range of the loss axis: from the lowest loss to a little above the highest first one."""
    lines = [line for line in losses if len(line)]
    low, high = min(float(line.min()) for line in lines), HEADROOM * max(float(line[0]) for line in lines)
    high = min(high, max(float(line.max()) for line in lines))
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _classes(at: int) -> str:
    return f"m{at % len(COLOURS)} d{at // len(COLOURS) % len(DASHES)}"


def _legend(entries: Sequence[tuple[int, str]], width: int) -> tuple[list[str], float]:
    """Return the elements of the legend, with as many entries per row as fit, and the top of the charts."""
    lines, x, y = [], float(EDGE), float(HEAD)
    for at, name in entries:
        wide = 28 + text_width(name)
        if x + wide > width - EDGE and x > EDGE:
            x, y = float(EDGE), y + ROW
        lines.append(element("line", class_=f"line {_classes(at)}", x1=x, y1=y + 6, x2=x + 22, y2=y + 6))
        lines.append(text(name, x + 28, y + 10, "entry"))
        x += wide + 18
    return lines, y + ROW + 18


def _counts(span: float) -> list[tuple[float, str]]:
    step = tick_step(span, 6)
    return [(at * step, number(at * step)) for at in range(floor(span / step * (1 + 1e-9)) + 1)]


def _axes(panel: _Chart, marks: list[tuple[float, str]], words: str) -> Iterator[str]:
    bottom = panel.top + HEIGHT
    for value, label in marks:
        x = panel.x(value)
        yield element("line", class_="tick", x1=x, y1=panel.top, x2=x, y2=bottom + 5)
        yield text(label, x, bottom + 19, "time mid")
    step = tick_step(panel.high - panel.low, 6)
    for at in range(-floor(-panel.low / step), floor(panel.high / step) + 1):
        y = panel.y(at * step)
        yield element("line", class_="tick", x1=panel.left, y1=y, x2=panel.right, y2=y)
        yield text(number(at * step), panel.left - 8, y + 4, "time end")
    yield text("loss", panel.left, panel.top - 8, "entry")
    yield text(words, (panel.left + panel.right) / 2, bottom + 37, "entry mid")


def _lines(
    panel: _Chart,
    drawn: Sequence[tuple[int, LossCurve]],
    smoothed: dict[int, FloatArray],
    along: Callable[[LossCurve], Sequence[float]],
) -> Iterator[str]:
    for at, curve in drawn:
        losses, places = smoothed[at], along(curve)
        shown = np.unique(np.linspace(0, len(losses) - 1, min(len(losses), MOST)).round().astype(int)).tolist()
        points = [(panel.x(places[one]), panel.y(float(losses[one]))) for one in shown]
        path = " ".join(f"{x:.5g},{y:.5g}" for x, y in points)
        tip = f"{curve.name}: loss {number(float(losses[-1]))}"
        yield f"<g>{element('title', tip)}{element('polyline', class_=f'line {_classes(at)}', points=path)}"
        yield f"{element('circle', class_=f'dot {_classes(at)}', cx=points[-1][0], cy=points[-1][1], r=2.5)}</g>"
