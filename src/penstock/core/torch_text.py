"""Read and write the CSV of `torch.distributed.pipelining`.

Its words for compute are penstock's, except for an overlapped pair: `(0F5;7B2)OVERLAP_F_B`. It represents one step,
without weight versions and replicas (those are left to DDP), so that only a synchronous schedule of one mini-batch can
be written, with one line per rank. Transfers are omitted: its runtime adds them, as penstock's does.
"""

from __future__ import annotations

import re

from penstock.core.action import Action, Op
from penstock.core.arguments import named
from penstock.core.schedule import Schedule, require_schedule
from penstock.core.shape import Law
from penstock.core.text import from_csv, require_text
from penstock.errors import InputError

_PAIR = re.compile(r"\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B")
_ADDED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


@named
def to_torch_csv(schedule: Schedule) -> str:
    """Return a schedule's compute actions in PyTorch's format."""
    require_schedule(schedule)
    shape = schedule.shape
    if shape.law is not Law.SYNC or shape.batches > 1:
        raise InputError(
            "a synchronous schedule of one mini-batch for PyTorch's format",
            f"law {shape.law.value!r} with {shape.batches} mini-batches",
            "use to_csv for other schedules",
        )
    lines = []
    for rank in range(shape.ranks):
        actions = schedule.actions(int(shape.first_slot[rank]))
        lines.append(",".join(_torch_word(action) for action in actions if action.op <= Op.FB))
    return "\n".join(lines) + "\n"


def _torch_word(action: Action) -> str:
    if action.joined is None:
        return str(action)
    return f"({action.stage}F{action.microbatch};{action.joined})OVERLAP_F_B"


def is_torch_csv(text: str) -> bool:
    """Return True if a text has words that only PyTorch's format uses."""
    return bool(_PAIR.search(text) or _ADDED.search(text))


@named
def from_torch_csv(text: str, where: str = "schedule") -> Schedule:
    """Return the schedule of PyTorch's CSV, without the transfers and sharding that its runtime added."""
    require_text(text, where)
    lines = []
    for line in text.splitlines():
        cells = (_PAIR.sub(r"\1&\2", cell.strip()) for cell in line.split(","))
        lines.append(
            ",".join("" if _ADDED.fullmatch(cell) else cell for cell in cells)
        )  # empty cells remain, so that error messages count them
    return from_csv("\n".join(lines), where)
