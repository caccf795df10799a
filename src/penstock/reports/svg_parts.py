"""Parts of an SVG document: elements, text, the style sheet, and the scale from seconds to pixels."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from penstock.core.action import Op
from penstock.reports.describe import printable
from penstock.reports.palette import FILLS, KIND_FILLS, ink, shade

CHUNKS = 8  # shades in the style sheet, scaled to the number of chunks

SHEET = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #1f2630 }
.ground { fill: #ffffff } .idle { fill: #eef1f5 } .tick { stroke: #10151c; stroke-opacity: .1 }
.name { font-size: 15px; font-weight: 600 } .label { font-weight: 600 }
.slot, .time, .figures, .peak, .entry { fill: #57606a; font-variant-numeric: tabular-nums }
.mid { text-anchor: middle } .end { text-anchor: end }
.number { font-size: 11px; text-anchor: middle; font-variant-numeric: tabular-nums; pointer-events: none }
.half { font-size: 9px }
.box { stroke: #ffffff; stroke-width: .75 } .thin { stroke: none }
.hop { fill: none; stroke-width: 1; stroke-opacity: .55 }
.base { stroke: #10151c; stroke-opacity: .25 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .ground { fill: #0f141a } .idle { fill: #1c232c } .tick { stroke: #ffffff }
  .slot, .time, .figures, .peak, .entry { fill: #9aa5b1 } .box { stroke: #0f141a } .base { stroke: #ffffff }
  .hop { stroke-opacity: .8 }
}
"""


@dataclass(frozen=True)
class Frame:
    """Time axis: `span` seconds from `left` to `right` pixels."""

    left: float
    right: float
    span: float

    @property
    def scale(self) -> float:
        """Pixels per second."""
        return (self.right - self.left) / self.span

    def x(self, moment: float) -> float:
        return self.left + moment * self.scale


def escaped(content: str) -> str:
    """Escape text for an XML or HTML document; unprintable characters are replaced."""
    return escape(printable(content))


def element(tag: str, content: str = "", **attributes: str | float) -> str:
    """Return an element with escaped text as content. `class_` becomes the attribute `class`."""
    written = "".join(f' {_name(key)}="{_value(value)}"' for key, value in attributes.items())
    return f"<{tag}{written}>{escaped(content)}</{tag}>" if content else f"<{tag}{written}/>"


def text(content: str, x: float, y: float, kind: str) -> str:
    return element("text", content, class_=kind, x=x, y=y)


def text_width(content: str, scale: float = 1.0) -> float:
    """Estimate the width of a text in pixels, for any of the fonts."""
    ems = sum(0.34 if sign in "fijlrt.,:;' ()" else 0.9 if sign in "mwMW&" else 0.6 for sign in content)
    return 12 * scale * ems


def box_class(op: Op, chunk: int, chunks: int) -> str:
    """Return the CSS class of a box of one operation on one of a rank's chunks."""
    return f"{op.name.lower()}{0 if chunks < 2 else 1 + round(chunk * (CHUNKS - 2) / (chunks - 1))}"


def style() -> str:
    """Return the style sheet, with a class per operation and shade: 0 for a single chunk, 1 (first) to 7 (last)."""
    rules = [SHEET]
    for op in FILLS:
        for step in range(CHUNKS):
            fill = shade(op, max(step - 1, 0), CHUNKS - 1)
            name = f"{op.name.lower()}{step}"
            rules.append(f".{name} {{ fill: {fill} }} .on-{name} {{ fill: {ink(fill)} }}\n")
    for op in (Op.SEND_F, Op.SEND_B):
        rules.append(f".hop.{op.name.lower()} {{ stroke: {FILLS[op]}; fill: none }}\n")
    rules += [f".kind-{kind.value} {{ fill: {fill} }}\n" for kind, fill in KIND_FILLS.items()]
    return f"<style>{''.join(rules)}</style>"


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    return escaped(value) if isinstance(value, str) else f"{round(float(value), 3):.10g}"
