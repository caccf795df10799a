"""A profile as a table of its layers, with notes on how reliable it is."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from penstock.core.profile import Layer, Profile
from penstock.profiler.measure import MeasuredProfile
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
    layer_table = Table(*heads, title=title, box=None, padding=(0, 0, 0, 1))
    layer_table.columns[0].min_width = 8
    for column in layer_table.columns[1:]:
        column.justify = "right"
    for layer, spent, held in zip(profile.layers, times, sizes, strict=True):
        shown = [f"{value / second:.2f}" for value in spent], [f"{value / byte:.2f}" for value in held]
        layer_table.add_row(layer.name, *shown[0], *([f"{layer.spread:.0%}"] if measured else []), *shown[1])
    return layer_table


def _times(layer: Layer) -> tuple[float, ...]:
    return layer.forward, layer.backward, layer.input_grad, layer.weight_grad, layer.update


def _sizes(layer: Layer) -> tuple[float, ...]:
    weights = layer.parameter_bytes + layer.buffer_bytes
    return layer.output_bytes, layer.kept_bytes, layer.kept_until_weight_bytes, weights, layer.optimizer_bytes


def _unit(units: tuple[tuple[str, float], ...], largest: float) -> tuple[str, float]:
    """Return the largest unit in which the largest number is at least 1."""
    return next((unit for unit in units if largest >= unit[1]), units[-1])


def notes(measured: MeasuredProfile) -> Iterator[str]:
    """Yield the lines that complete the table."""
    profile, own = measured.profile, measured.profile.per_stage
    if measured.whole is not None:
        yield f"one layer, as the model cannot be cut: {measured.whole}"
    beside = f"{seconds(own.forward)} forward, {seconds(own.backward)} backward, {seconds(own.update)} update"
    yield f"a stage takes for itself, beside its layers: {beside}"
    peers = f", {profile.busy} processes at a time" if profile.busy > 1 else ""
    disturbed = f"{measured.taken - measured.quiet} of {measured.taken} taken were disturbed by other processes"
    yield f"from the middle half of {profile.repetitions} samples{peers}; {disturbed}"
    if profile.disturbed:
        yield f"NOISY: {profile.disturbed} disturbed samples had to be used; measure again when the machine is quiet"
