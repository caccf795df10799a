"""A plan that does not fit its devices: the smallest changes to it that would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.app.predict import predict
from penstock.planners.infeasible import enough
from penstock.planners.prediction import Prediction
from penstock.planners.scaled import scaled


@dataclass(frozen=True)
class Change:
    """What to do, and how much longer a step of the same batch would take, as a share; None where that is unknown."""

    what: str
    more: float | None = None

    def __str__(self) -> str:
        return self.what if self.more is None else f"{self.what} (step {self.more:+.1%})"


def changes_that_fit(found: Prediction) -> list[Change]:
    """Each of them alone would do; by the simulator, the one that costs least first. None where the plan fits."""
    if not found.over:
        return []
    tried = [(what, one) for what, one in (*_recomputed(found), *_smaller(found)) if not one.over]
    step = found.step_seconds or 1.0
    costs = [Change(what, one.step_seconds / step - 1) for what, one in tried]
    needed = max(found.memory[device] for device in found.over)
    return [*sorted(costs, key=lambda change: change.more or 0.0), Change(f"devices of {enough(needed)} GB")]


def _recomputed(found: Prediction) -> Iterator[tuple[str, Prediction]]:
    """The stages of the devices that are short recompute their activations; then all stages do."""
    plan = found.plan
    short = {rank for rank, slots in enumerate(plan.devices) if any(d in found.over for slot in slots for d in slot)}
    some = frozenset(s for s, rank in enumerate(plan.placement) if rank in short)
    for chosen in dict.fromkeys((some, frozenset(range(len(plan.stages))))):
        stages = tuple(
            replace(stage, recompute=stage.recompute or s in chosen, offload=stage.offload and s not in chosen)
            for s, stage in enumerate(plan.stages)
        )
        if stages != plan.stages:
            outcome = replace(found.outcome, plan=replace(plan, stages=stages))
            named = "all stages" if len(chosen) == len(stages) else f"stage(s) {', '.join(map(str, sorted(chosen)))}"
            one = predict(outcome, found.cluster)
            yield f"recompute of {named}", one
            if not one.over:
                return


def _smaller(found: Prediction) -> Iterator[tuple[str, Prediction]]:
    """The largest micro-batches that fit, of the same batch."""
    plan, profile = found.plan, found.outcome.profile
    for parts in (k for k in range(2, profile.samples + 1) if profile.samples % k == 0):
        outcome = replace(
            found.outcome,
            plan=replace(plan, microbatches=plan.microbatches * parts),
            profile=scaled(profile, profile.samples // parts),
        )
        one = predict(outcome, found.cluster)
        if not one.over:
            yield f"micro-batches of {profile.samples // parts} row(s) in place of {profile.samples}", one
            return
