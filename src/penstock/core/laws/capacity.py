"""Law 6: no slot holds more activations than its cap."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.core.cost import Costs
from penstock.core.faults import Fault, FaultKind
from penstock.core.given import Numbers
from penstock.core.laws.evidence import Evidence
from penstock.core.memory import activation_changes, levels
from penstock.errors import InputError


def capacity_faults(e: Evidence, cap: Numbers, costs: Costs) -> Iterator[Fault]:
    """The first action of every slot that goes over the cap: one number, or one a slot."""
    slots = e.full.shape.slots
    caps = np.atleast_1d(np.asarray(cap, dtype=np.float64))
    if caps.shape not in ((1,), (slots,)) or np.isnan(caps).any() or (caps <= 0).any():
        raise InputError(f"a positive memory cap, or one for each of {slots} slots", caps.tolist(), "correct memory")
    caps = np.broadcast_to(caps, (slots,))
    changes = list(activation_changes(e.full, costs).values())
    begins = np.sum([begin for begin, _ in changes], axis=0)
    ends = np.sum([end for _, end in changes], axis=0)
    begun, _ = levels(e.full, (begins, ends))
    for slot in range(slots):
        held = begun[int(e.full.starts[slot]) : int(e.full.starts[slot + 1])]
        over = np.flatnonzero(held > caps[slot] * (1 + 1e-9))  # costs that should add up to the cap may round above it
        if len(over):
            said = f"memory goes over the cap of {caps[slot]:g}; the peak is {held.max():g}"
            yield e.fault(FaultKind.MEMORY, int(e.full.starts[slot]) + int(over[0]), said)
