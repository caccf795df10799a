"""Memory in figures: the most that every slot holds, by kind, and beside it what its process really had."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from penstock.core.memory import MemoryKind
from penstock.core.timeline import Timeline
from penstock.errors import InputError
from penstock.reports.describe import KIND_WORDS, amount, in_bytes, slot_labels
from penstock.reports.palette import STACK


def memory_table(predicted: Timeline, measured: Sequence[float] = ()) -> Table:
    """One line a slot. Kinds are highest at different times, so their sum may be more than the whole at its highest.

    `measured`: bytes of every slot, where somebody has measured them.
    """
    memory, schedule = predicted.memory, predicted.schedule
    if memory is None:
        raise InputError("a timeline with memory in it", "one without", "predict it from costs that have footprints")
    if measured and len(measured) != schedule.shape.slots:
        raise InputError(f"measured memory of {schedule.shape.slots} slots", len(measured), "give one number a slot")
    peaks = {kind: memory.peak(schedule, (kind,)) for kind in STACK}
    kinds = [kind for kind, peak in peaks.items() if peak.any()]
    table, bytes_, whole = Table(*_columns(kinds, bool(measured))), in_bytes(predicted), memory.peak(schedule)
    for column in table.columns[1:]:
        column.justify = "right"
    for slot, label in enumerate(slot_labels(schedule.shape)):
        told = [float(peaks[kind][slot]) for kind in kinds] + [float(whole[slot])]
        told += [float(measured[slot])] if measured else []
        table.add_row(label, *(Text(amount(value, bytes_)) for value in told))
    return table


def _columns(kinds: Sequence[MemoryKind], measured: bool) -> list[str]:
    return ["slot", *(KIND_WORDS[kind] for kind in kinds), "all, predicted", *(["measured"] if measured else [])]
