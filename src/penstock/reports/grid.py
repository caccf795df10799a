"""A schedule as a grid of words, one line per slot:

    rank 0  0F0  0F1  0B0  0F2  0B1  0B2
    rank 1  1F0  1B0  1F1  1B1 !1F1  1B2
    ! rank 1: 1F1: occurs a second time; remove one of the two

`Action.parse` reads these words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.style import Style
from rich.text import Text

from penstock.core.action import Action
from penstock.core.faults import Fault
from penstock.core.schedule import Schedule
from penstock.reports.describe import slot_labels
from penstock.reports.palette import FILLS, ink

QUIET = Style(dim=True)
WRONG = Style(color="#ffffff", bgcolor="#c01c28", bold=True)
GAP = 2  # columns between words; the second is for a fault's mark


def grid(schedule: Schedule, faults: Sequence[Fault] = (), width: int | None = None) -> Text:
    """Return a schedule as words, coloured by operation, in several blocks if lines are longer than `width`.

    Faulty words are marked with `!`; all faults are listed below.
    """
    slots = [list(schedule.actions(slot)) for slot in range(schedule.shape.slots)]
    labels = slot_labels(schedule.shape)
    wrong = {(fault.slot, fault.cell) for fault in faults}
    margin = max(map(len, labels))
    column = max((len(str(action)) for actions in slots for action in actions), default=0) + GAP
    longest = max(map(len, slots), default=0)
    fits = longest if width is None else (width - margin) // column
    text = Text(no_wrap=True, overflow="ignore")
    for cells in _blocks(longest, max(fits, 1)):
        text.append("\n\n" if cells.start else "")
        for slot, actions in enumerate(slots):
            text.append(("\n" if slot else "") + labels[slot].ljust(margin), QUIET)
            for cell in cells[: max(0, len(actions) - cells.start)]:
                _append_word(text, actions[cell], column, (slot, cell) in wrong)
    for fault in faults:
        text.append(f"\n! {labels[fault.slot]}: {fault}", Style(bold=True))
    return text


def _blocks(length: int, size: int) -> Iterator[range]:
    """Yield ranges of cells, at least one, which may be empty."""
    for first in range(0, max(length, 1), size):
        yield range(first, min(first + size, length))


def _append_word(text: Text, action: Action, column: int, wrong: bool) -> None:
    """Append a word, right aligned, so that micro-batches are aligned."""
    word = f"{'!' if wrong else ''}{action}"
    text.append(" " * (column - len(word)))
    if wrong:
        text.append(word, WRONG)
        return
    for at, part in enumerate((action, action.joined)):
        if part is not None:
            alone = Action(part.op, part.stage, part.microbatch, part.version, part.peer, part.replica)
            text.append("&" if at else "").append(str(alone), Style(color=ink(FILLS[part.op]), bgcolor=FILLS[part.op]))
