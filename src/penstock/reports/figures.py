"""The figures of a timeline as text, of the whole and of every slot."""

from __future__ import annotations

from penstock.core.shape import Law
from penstock.core.timeline import Timeline
from penstock.reports.describe import amount, in_bytes, number, percent, placed, printable, seconds, slot_labels

NOISE = 1e-9  # idle times below this share of the makespan are rounding errors


def figures(timeline: Timeline) -> dict[str, str]:
    """Return the main figures of a timeline as text, by name. Idle is the mean over the slots."""
    values = {
        **_per_mini_batch(timeline),
        "makespan": seconds(timeline.makespan),
        "bubble": percent(timeline.bubble),
        "utilisation": percent(timeline.utilisation),
        "idle (barrier view)": _idle(timeline, float(timeline.idle.mean())),
        "idle (own view)": _idle(timeline, float(timeline.idle_own.mean())),
    }
    if timeline.memory is not None:
        values["peak activations"] = amount(float(timeline.peak_activations.max()), in_bytes(timeline))
    values["weight versions"] = number(float(timeline.weight_versions.max()))
    return values


def _per_mini_batch(timeline: Timeline) -> dict[str, str]:
    """Return the figures of a run of several mini-batches that do not depend on the run's length."""
    shape, pace = timeline.schedule.shape, timeline.pace
    values = {"mini-batches": str(shape.batches)} if shape.batches > 1 else {}
    if shape.batches == 1 or pace is None:
        return values
    values["a mini-batch"] = seconds(pace.seconds)
    if shape.law is not Law.SYNC:
        values |= {"steady bubble": percent(pace.bubble), "fill and drain": seconds(pace.fill_and_drain)}
    return values


def headline(timeline: Timeline) -> str:
    """Describe a timeline in one line, beginning with the time of one mini-batch."""
    shape, kind = timeline.schedule.shape, "measured" if timeline.measured else "predicted"
    name = f"{shape.name}, {placed(shape)}" if shape.chunks > 1 or shape.name == "auto" else shape.name
    return f"{printable(name)}, {kind}: {_headline(timeline)}"


def _headline(timeline: Timeline) -> str:
    values, shape = figures(timeline), timeline.schedule.shape
    whole = f"makespan {values['makespan']} of {shape.batches} mini-batches"
    shares = f"bubble {values['bubble']}, utilisation {values['utilisation']}"
    if shape.batches == 1:
        return f"makespan {values['makespan']} of one mini-batch, {shares}"
    if shape.law is Law.SYNC:
        return f"{values['a mini-batch']} a mini-batch, {shares}; {whole}" if timeline.pace else f"{whole}, {shares}"
    if timeline.pace is None:
        return f"{whole}, too few for a steady state; {shares}, fill and drain included"
    steady = f"{values['a mini-batch']} a mini-batch in the steady state, bubble {values['steady bubble']}"
    return f"{steady}; fill and drain {values['fill and drain']}; {whole}"


def _idle(timeline: Timeline, idle: float) -> str:
    return seconds(0.0 if abs(idle) <= NOISE * timeline.makespan else idle)


def slot_figures(timeline: Timeline) -> list[dict[str, str]]:
    """Return the figures of each slot: work, idle time in both views, peak activations and weight versions."""
    shape, bytes_ = timeline.schedule.shape, in_bytes(timeline)
    span, idle, own = timeline.makespan, timeline.idle, timeline.idle_own
    peaks, versions = timeline.peak_activations, timeline.weight_versions
    return [
        {
            "slot": label,
            "stages": " ".join(map(str, shape.stages_of(int(shape.slot_rank[slot])))),
            "work": seconds(float(timeline.work[slot])),
            "idle": _idle(timeline, float(idle[slot])),
            "of makespan": percent(float(idle[slot]) / span) if span > 0 else "-",
            "idle, own view": _idle(timeline, float(own[slot])),
            "peak activations": "-" if timeline.memory is None else amount(float(peaks[slot]), bytes_),
            "weight versions": number(float(versions[slot])),
        }
        for slot, label in enumerate(slot_labels(shape))
    ]
