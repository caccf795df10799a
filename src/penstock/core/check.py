"""Check a schedule against every law and report all faults at once.

1. *Actions*: every stage runs every micro-batch once: a forward, and a full backward or an input and a weight gradient,
   on the rank that holds it (laws/actions.py).
2. *Order in a slot*: forward before backward, input before weight gradient, stages of one slot in the order of data.
3. *Transfers*: each tensor is sent once after it is made, and received once before it is used (laws/transfers.py).
4. *Versions, reductions, updates* (laws/versions.py).
5. *Progress*: every slot reaches the end of its list (laws/progress.py).
6. *Memory*: no slot exceeds its cap (laws/capacity.py).

A schedule that is not lowered is lowered first; its faults point into the grid of the schedule that was passed.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.arguments import named
from penstock.core.cost import Costs, flat_costs
from penstock.core.faults import Fault, FaultKind, Report
from penstock.core.laws.actions import action_faults
from penstock.core.laws.capacity import capacity_faults
from penstock.core.laws.context import CheckContext
from penstock.core.laws.progress import TransferKind, progress_faults
from penstock.core.laws.transfers import transfer_faults
from penstock.core.laws.versions import version_faults
from penstock.core.match import Match
from penstock.core.schedule import Schedule
from penstock.core.validation import Numbers
from penstock.errors import InputError, ScheduleError

# After these faults progress is not checked, because a deadlock would only be a consequence of them.
_BLINDING = (FaultKind.STRAY, FaultKind.MISSING, FaultKind.DOUBLED, FaultKind.PARTNER)


@named
def check(
    schedule: Schedule,
    *,
    transfers: TransferKind | str = TransferKind.BUFFERED,
    memory: Numbers | None = None,
    costs: Costs | None = None,
) -> Report:
    """Return a report of every fault.

    `memory` caps each slot's activations, in the unit of `costs` (default: one rank's A).
    """
    if transfers not in list(TransferKind):
        raise InputError("transfers to be buffered, in-order or blocking", repr(transfers), "choose one of them")
    context = CheckContext.of(schedule)
    faults = _faults(context, TransferKind(transfers))
    if memory is not None and not _blind(faults):
        faults += tuple(capacity_faults(context, memory, costs or flat_costs(schedule.shape)))
    return Report(schedule, faults)


@dataclass(frozen=True, eq=False)
class Proven:
    """A lowered schedule that passed every check, with its transfers paired. Only `prove` constructs one."""

    schedule: Schedule
    pairs: Match


def prove(schedule: Schedule, progress: bool = True) -> Proven:
    """Lower a schedule and check it; raise ScheduleError with all faults unless it is sound.

    `progress=False` skips law 5, for a caller that detects deadlocks itself, as the simulator does.
    """
    context = CheckContext.of(schedule)
    faults = _faults(context, TransferKind.BUFFERED if progress else None)
    if faults:
        raise ScheduleError(str(Report(schedule, faults)), faults)
    return Proven(context.full, context.pairs)


def _faults(context: CheckContext, transfers: TransferKind | None) -> tuple[Fault, ...]:
    faults = (*action_faults(context), *transfer_faults(context), *version_faults(context))
    if transfers is None or _blind(faults):
        return faults
    return (*faults, *progress_faults(context, transfers))


def _blind(faults: tuple[Fault, ...]) -> bool:
    return any(fault.kind in _BLINDING for fault in faults)
