"""Which plans training runs; without torch, as the planners' commands ask too."""

from __future__ import annotations

from penstock.core.plan import Plan
from penstock.errors import InputError
from penstock.schedules.registry import METHODS


def refusal(plan: Plan) -> InputError | None:
    """Return why training does not run a plan yet; None if it does."""
    replicas, widest = max(plan.replicas), max(map(len, plan.slots))
    if replicas > 1 and plan.schedule in METHODS and METHODS[plan.schedule].asynchronous:
        expected = "one replica a stage in an asynchronous plan, which is all that can be run so far"
        return InputError(expected, replicas, "plan again by `penstock plan --replicas 1`, or by a method that flushes")
    if widest > 1:
        expected = "a plan with one device in each tensor group, which is all that can be run so far"
        return InputError(expected, widest, "plan again by penstock plan")
    return None
