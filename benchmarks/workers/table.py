"""One line a case: ours, the peer, the limit, their ratios, and what was wanted."""

from __future__ import annotations

from dataclasses import dataclass

HEAD = f"{'case':<38} {'ours':>10} {'peer':>10} {'limit':>10}  {'ours/limit':>10} {'peer/limit':>10} {'peer/ours':>9}"


@dataclass(frozen=True)
class Line:
    """Seconds or bytes; `wanted` is what must hold of them, as words and as a number with its bound."""

    case: str
    unit: str
    ours: float | None
    peer: float | None
    limit: float | None
    wanted: str = ""
    value: float | None = None
    least: float | None = None
    most: float | None = None
    quiet: str = ""

    @property
    def met(self):
        if self.value is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    def __str__(self):
        parts = [f"{self.case:<38}", *(self._figure(value) for value in (self.ours, self.peer, self.limit)), ""]
        parts += [f"{_ratio(self.ours, self.limit):>10}", f"{_ratio(self.peer, self.limit):>10}"]
        parts += [f"{_ratio(self.peer, self.ours):>9}"]
        if self.wanted:
            answer = {True: "yes", False: "NO", None: "not measured"}[self.met]
            parts += [f"  wanted: {self.wanted}: {answer}"]
        return " ".join([*parts, f"  {self.quiet}" if self.quiet else ""]).rstrip()

    def to_json(self):
        kept = ("case", "unit", "ours", "peer", "limit", "wanted", "value", "met")
        return {name: getattr(self, name) for name in kept}

    def _figure(self, value):
        if value is None:
            return f"{'-':>10}"
        return f"{value * 1e3:>7.1f} ms" if self.unit == "s" else f"{value / 2**20:>6.1f} MiB"


def _ratio(over, under):
    return "-" if over is None or not under else f"{over / under:.3f}"


def line(case, ours, peer, limit, **wanted):
    """From samples; how many of them were quiet is told where not all were."""
    both = [samples for samples in (ours, peer) if samples]
    kept, all_of = sum(len(samples.quiet) for samples in both), sum(len(samples.all) for samples in both)
    bad = any(not samples.quiet for samples in both)
    note = "NO QUIET SAMPLE" if bad else "" if kept == all_of else f"({kept} of {all_of} samples were quiet)"
    return Line(case, "s", ours.seconds if ours else None, peer.seconds, limit, quiet=note, **wanted)
