"""The figures of a timeline, in words: of the whole and of every slot."""

from __future__ import annotations

from penstock.core.timeline import Timeline
from penstock.reports.describe import amount, in_bytes, number, percent, seconds, slot_labels


def figures(timeline: Timeline) -> dict[str, str]:
    """The numbers every report opens with, in words. Idle is the mean over the slots."""
    told = {
        "makespan": seconds(timeline.makespan),
        "bubble": percent(timeline.bubble),
        "utilisation": percent(timeline.utilisation),
        "idle (barrier view)": seconds(float(timeline.idle.mean())),
        "idle (own view)": seconds(float(timeline.idle_own.mean())),
    }
    if timeline.memory is not None:
        told["peak activations"] = amount(float(timeline.peak_activations.max()), in_bytes(timeline))
    told["weight versions"] = number(float(timeline.weight_versions.max()))
    return told


def headline(timeline: Timeline) -> str:
    """A timeline in one line."""
    told = figures(timeline)
    kind = "measured" if timeline.measured else "predicted"
    return f"{timeline.schedule.shape.name}, {kind}: " + ", ".join(
        f"{name} {told[name]}" for name in ("makespan", "bubble", "utilisation")
    )


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
            "idle": seconds(float(idle[slot])),
            "of makespan": percent(float(idle[slot]) / span) if span > 0 else "-",
            "idle, own view": seconds(float(own[slot])),
            "peak activations": "-" if timeline.memory is None else amount(float(peaks[slot]), bytes_),
            "weight versions": number(float(versions[slot])),
        }
        for slot, label in enumerate(slot_labels(shape))
    ]
