"""The figures of a timeline, in words: of the whole and of every slot."""

from __future__ import annotations

from penstock.core.shape import Law
from penstock.core.timeline import Timeline
from penstock.reports.describe import amount, in_bytes, number, percent, placed, printable, seconds, slot_labels

NOISE = 1e-9  # of the makespan: what rounding leaves of times that cancel out


def figures(timeline: Timeline) -> dict[str, str]:
    """The numbers every report opens with, in words. Idle is the mean over the slots."""
    told = {
        **_of_a_mini_batch(timeline),
        "makespan": seconds(timeline.makespan),
        "bubble": percent(timeline.bubble),
        "utilisation": percent(timeline.utilisation),
        "idle (barrier view)": _idle(timeline, float(timeline.idle.mean())),
        "idle (own view)": _idle(timeline, float(timeline.idle_own.mean())),
    }
    if timeline.memory is not None:
        told["peak activations"] = amount(float(timeline.peak_activations.max()), in_bytes(timeline))
    told["weight versions"] = number(float(timeline.weight_versions.max()))
    return told


def _of_a_mini_batch(timeline: Timeline) -> dict[str, str]:
    """Figures of a run of several that can stand beside those of another, however long."""
    shape, pace = timeline.schedule.shape, timeline.pace
    told = {"mini-batches": str(shape.batches)} if shape.batches > 1 else {}
    if shape.batches == 1 or pace is None:
        return told
    told["a mini-batch"] = seconds(pace.seconds)
    if shape.law is not Law.SYNC:
        told |= {"steady bubble": percent(pace.bubble), "fill and drain": seconds(pace.fill_and_drain)}
    return told


def headline(timeline: Timeline) -> str:
    """A timeline in one line: what one mini-batch takes comes first."""
    shape, kind = timeline.schedule.shape, "measured" if timeline.measured else "predicted"
    name = f"{shape.name}, {placed(shape)}" if shape.chunks > 1 or shape.name == "auto" else shape.name
    return f"{printable(name)}, {kind}: {_headline(timeline)}"


def _headline(timeline: Timeline) -> str:
    told, shape = figures(timeline), timeline.schedule.shape
    whole = f"makespan {told['makespan']} of {shape.batches} mini-batches"
    shares = f"bubble {told['bubble']}, utilisation {told['utilisation']}"
    if shape.batches == 1:
        return f"makespan {told['makespan']} of one mini-batch, {shares}"
    if shape.law is Law.SYNC:
        return f"{told['a mini-batch']} a mini-batch, {shares}; {whole}" if timeline.pace else f"{whole}, {shares}"
    if timeline.pace is None:
        return f"{whole}, too few for a steady state; {shares}, fill and drain included"
    steady = f"{told['a mini-batch']} a mini-batch in the steady state, bubble {told['steady bubble']}"
    return f"{steady}; fill and drain {told['fill and drain']}; {whole}"


def _idle(timeline: Timeline, idle: float) -> str:
    return seconds(0.0 if abs(idle) <= NOISE * timeline.makespan else idle)


def slot_figures(timeline: Timeline) -> list[dict[str, str]]:
    """One line a slot: work, idleness in both views, peak activations and weight versions."""
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
