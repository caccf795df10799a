"""Tables of a timeline for a terminal: figures of the whole and of every slot, and peak memory by kind."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock.core.memory import MemoryKind
from penstock.core.timeline import Timeline
from penstock.errors import InputError
from penstock.reports.describe import KIND_WORDS, amount, in_bytes, slot_labels
from penstock.reports.figures import headline, slot_figures
from penstock.reports.palette import STACK


def summary(timeline: Timeline) -> Group:
    """Return a headline and a table with a line per slot: work, idle time, peak activations, weight versions."""
    lines = slot_figures(timeline)
    table = Table(box=None, pad_edge=False)  # without lines between columns, so that the headings fit into 80
    for at, name in enumerate(lines[0]):
        table.add_column(name, justify="right" if at else "left", min_width=max(map(len, name.split())))
    for line in lines:
        table.add_row(*(Text(value) for value in line.values()))
    return Group(Text(headline(timeline), "bold"), table)


def memory_table(predicted: Timeline, measured: Sequence[float] = ()) -> Table:
    """Return a table of peak memory with a line per slot, and `measured` bytes of every slot in a column, if given.

    Kinds reach their peaks at different times, so that the sum of their peaks may exceed the peak of all.
    """
    memory, schedule = predicted.memory, predicted.schedule
    if memory is None:
        raise InputError("a timeline with memory", "one without", "predict it from costs that have footprints")
    if measured and len(measured) != schedule.shape.slots:
        raise InputError(f"measured memory of {schedule.shape.slots} slots", len(measured), "give one number a slot")
    peaks = {kind: memory.peak(schedule, (kind,)) for kind in STACK}
    kinds = [kind for kind, peak in peaks.items() if peak.any()]
    table, bytes_, whole = Table(*_columns(kinds, bool(measured))), in_bytes(predicted), memory.peak(schedule)
    for column in table.columns[1:]:
        column.justify = "right"
    for slot, label in enumerate(slot_labels(schedule.shape)):
        amounts = [float(peaks[kind][slot]) for kind in kinds] + [float(whole[slot])]
        amounts += [float(measured[slot])] if measured else []
        table.add_row(label, *(Text(amount(value, bytes_)) for value in amounts))
    return table


def _columns(kinds: Sequence[MemoryKind], measured: bool) -> list[str]:
    return ["slot", *(KIND_WORDS[kind] for kind in kinds), "all, predicted", *(["measured"] if measured else [])]
