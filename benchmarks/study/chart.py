"""A small line chart as SVG: axes, lines, a legend beside them. Serves light and dark pages by a white card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 900, 430
LEFT, RIGHT, TOP, BOTTOM = 60, 250, 44, 52
INK, GREY, LINE = "#10151c", "#5b6571", "#dfe4ea"
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: str
    dash: str = ""
    marks: bool = False


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float
    ticks: Sequence[float]
    text: Sequence[str] = ()

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series], level: tuple[float, str] | None = None) -> str:
    """`level` is a line across, with words on it."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 26, title, size=16),
        *_axes(x, y),
    ]
    if level is not None:
        at = _down(y, level[0])
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="{INK}" stroke-dasharray="2 3"/>')
        parts.append(_text(LEFT + 6, at + 15, level[1], GREY, size=12))
    parts.append(f'<clipPath id="inside"><path d="M{LEFT} {TOP}H{WIDTH}V{HEIGHT}H{LEFT}Z"/></clipPath>')
    parts.append('<g clip-path="url(#inside)">')
    for one in series:
        parts.extend(_drawn(x, y, one))
    parts.append("</g>")
    parts.extend(_legend(series))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(x: Axis, y: Axis) -> list[str]:
    bottom, parts = HEIGHT - BOTTOM, []
    for number, tick in enumerate(y.ticks):
        at = _down(y, tick)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="{LINE}"/>')
        parts.append(_text(LEFT - 8, at + 4, y.text[number] if y.text else f"{tick:g}", GREY, "end"))
    for number, tick in enumerate(x.ticks):
        parts.append(_text(_across(x, tick), bottom + 20, x.text[number] if x.text else f"{tick:,g}", GREY, "middle"))
    parts.append(f'<path d="M{LEFT} {bottom}H{WIDTH - RIGHT}" stroke="{GREY}"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x.label, INK, "middle"))
    middle = (TOP + bottom) / 2
    turned = f'<g transform="translate(16 {middle:.0f}) rotate(-90)">{_text(0, 0, y.label, INK, "middle")}</g>'
    return [*parts, turned]


def _drawn(x: Axis, y: Axis, one: Series) -> list[str]:
    points = [(_across(x, a), _down(y, b)) for a, b in one.points]
    way = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
    dash = f' stroke-dasharray="{one.dash}"' if one.dash else ""
    parts = [f'<path d="{way}" fill="none" stroke="{one.colour}" stroke-width="2.2" stroke-linejoin="round"{dash}/>']
    if one.marks:
        parts.extend(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.6" fill="{one.colour}"/>' for a, b in points)
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    parts, left = [], WIDTH - RIGHT + 22
    for number, one in enumerate(series):
        at = TOP + 12 + 23 * number
        dash = f' stroke-dasharray="{one.dash}"' if one.dash else ""
        parts.append(f'<path d="M{left} {at}h26" stroke="{one.colour}" stroke-width="2.6"{dash}/>')
        parts.append(_text(left + 34, at + 4, one.name))
    return parts


def _text(x: float, y: float, words: str, colour: str = INK, anchor: str = "start", size: int = 13) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{escape(words)}</text>"


def _across(x: Axis, value: float) -> float:
    return LEFT + x.share(value) * (WIDTH - LEFT - RIGHT)


def _down(y: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - y.share(value) * (HEIGHT - TOP - BOTTOM)
