"""Law 6: no slot holds more activations than its cap."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.core.cost import Costs
from penstock.core.faults import Fault, FaultKind
from penstock.core.laws.context import CheckContext
from penstock.core.memory import activation_changes, levels
from penstock.core.validation import Numbers
from penstock.errors import InputError


def capacity_faults(context: CheckContext, cap: Numbers, costs: Costs) -> Iterator[Fault]:
    """Yield the first action of every slot that exceeds the cap, which is one number or one per slot."""
    slots = context.full.shape.slots
    caps = np.atleast_1d(np.asarray(cap, dtype=np.float64))
    if caps.shape not in ((1,), (slots,)) or np.isnan(caps).any() or (caps <= 0).any():
        raise InputError(f"a positive memory cap, or one for each of {slots} slots", caps.tolist(), "correct memory")
    caps = np.broadcast_to(caps, (slots,))
    changes = list(activation_changes(context.full, costs).values())
    begins = np.sum([begin for begin, _ in changes], axis=0)
    ends = np.sum([end for _, end in changes], axis=0)
    begun, _ = levels(context.full, (begins, ends))
    for slot in range(slots):
        held = begun[int(context.full.starts[slot]) : int(context.full.starts[slot + 1])]
        over = np.flatnonzero(held > caps[slot] * (1 + 1e-9))  # allow for rounding of costs that add up to the cap
        if len(over):
            message = f"memory goes over the cap of {caps[slot]:g}; the peak is {held.max():g}"
            yield context.fault(FaultKind.MEMORY, int(context.full.starts[slot]) + int(over[0]), message)
