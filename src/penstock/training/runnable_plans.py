"""Which plans training runs; without torch, as the planners' commands ask too."""

from __future__ import annotations

from penstock.core.plan import Plan
from penstock.errors import InputError


def refusal(plan: Plan) -> InputError | None:
    """Return why training does not run a plan yet; None if it does."""
    widest = max(map(len, plan.slots))
    if widest > 1:
        expected = "a plan with one device in each tensor group, which is all that can be run so far"
        return InputError(expected, widest, "plan again by penstock plan")
    most = max(plan.replicas)
    unstashed = plan.schedule == "pipemare" or dict(plan.options).get("stash") is False
    if most > 1 and unstashed:
        expected = "a plan whose stages have one replica where weights are not stashed, so far"
        return InputError(expected, f"{most} under {plan.schedule}", "plan by pipedream or 2bw, or with --replicas 1")
    return None
