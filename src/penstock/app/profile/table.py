"""A profile for people: a table of its layers, and how far it can be trusted."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from penstock.core.profile import Layer, Profile
from penstock.profiler.measure import Measured
from penstock.reports.describe import seconds

TIMES = ("F", "B", "I", "W", "U")  # forward, backward, its two halves, update
SIZES = ("sent", "kept", "till W", "weight", "state")
UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
BYTES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def table(profile: Profile) -> Table:
    times, sizes = [_times(layer) for layer in profile.layers], [_sizes(layer) for layer in profile.layers]
    time, second = _unit(UNITS, max(max(row) for row in times))
    size, byte = _unit(BYTES, max(max(row) for row in sizes))
    measured = profile.repetitions > 0
    spread = ("±",) if measured else ()
    heads = ("layer", *(f"{name}\n{time}" for name in TIMES), *spread, *(f"{name}\n{size}" for name in SIZES))
    title = f"a micro-batch of {profile.samples} rows on {profile.device}"
    found = Table(*heads, title=title, box=None, padding=(0, 0, 0, 1))
    found.columns[0].min_width = 8
    for column in found.columns[1:]:
        column.justify = "right"
    for layer, spent, held in zip(profile.layers, times, sizes, strict=True):
        shown = [f"{value / second:.2f}" for value in spent], [f"{value / byte:.2f}" for value in held]
        found.add_row(layer.name, *shown[0], *([f"{layer.spread:.0%}"] if measured else []), *shown[1])
    return found


def _times(layer: Layer) -> tuple[float, ...]:
    return layer.forward, layer.backward, layer.input_grad, layer.weight_grad, layer.update


def _sizes(layer: Layer) -> tuple[float, ...]:
    weights = layer.parameter_bytes + layer.buffer_bytes
    return layer.output_bytes, layer.kept_bytes, layer.kept_until_weight_bytes, weights, layer.optimizer_bytes


def _unit(units: tuple[tuple[str, float], ...], largest: float) -> tuple[str, float]:
    """The largest in which the largest number is no fraction."""
    return next((unit for unit in units if largest >= unit[1]), units[-1])


def said(found: Measured) -> Iterator[str]:
    """What the table does not say."""
    profile, own = found.profile, found.profile.per_stage
    if found.whole is not None:
        yield f"one layer, as the model cannot be cut: {found.whole}"
    beside = f"{seconds(own.forward)} forward, {seconds(own.backward)} backward, {seconds(own.update)} update"
    yield f"a stage takes for itself, beside its layers: {beside}"
    company = f", {profile.busy} processes at a time" if profile.busy > 1 else ""
    loud = f"{found.taken - found.quiet} of {found.taken} taken were disturbed by other processes"
    yield f"from the middle half of {profile.repetitions} samples{company}; {loud}"
    if profile.disturbed:
        yield f"NOISY: {profile.disturbed} disturbed samples had to be used; measure again when the machine is quiet"
