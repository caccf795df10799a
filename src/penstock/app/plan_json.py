"""A plan as scripts read it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.app.plan_fit import changes_that_fit
from penstock.app.plan_why import delay, less_than_a_row, not_yet, passed_over, proof, runners_up, traffic
from penstock.planners.prediction import Prediction
from penstock.schedules.registry import METHODS


def as_json(found: Prediction) -> dict[str, Any]:
    """What scripts read. `layers` count in the order of the profile, or of `order` where that is given."""
    layers = found.outcome.profile.layers
    return {
        "method": found.outcome.method,
        "schedule": found.plan.schedule,
        "microbatches": found.plan.microbatches,
        "rows": found.rows,
        "stages": [
            {
                "layers": [stage.first, stage.last],
                "names": [layers[stage.first].name, layers[stage.last].name],
                "rank": rank,
                "devices": [device for slot in found.plan.devices[rank] for device in slot],
                "replicas": len(found.plan.devices[rank]),
                "recompute": stage.recompute,
                "offload": stage.offload,
            }
            for stage, rank in zip(found.plan.stages, found.plan.placement, strict=True)
        ],
        "step_seconds": found.step_seconds,
        "throughput": found.throughput,
        "bubble": found.timeline.bubble,
        "memory": [
            {"device": device, "bytes": held, "limit": _limit(found.cluster.devices[device].memory)}
            for device, held in sorted(found.memory.items())
        ],
        "fits": not found.over,
        "whole_rows": less_than_a_row(found) is None,
        "trainable": not_yet(found) is None,
        "asynchronous": METHODS[found.plan.schedule].asynchronous,
        "delay": delay(found),
        "would_fit": [asdict(change) for change in changes_that_fit(found)],
        "bottleneck": [{"share": share, "what": what} for share, what in found.busy[:3]],
        "traffic": [asdict(moved) for moved in traffic(found)],
        "proof": proof(found),
        "passed_over": passed_over(found),
        "runners_up": [
            {"schedule": loss.name, "step_seconds": loss.step_seconds, "more": loss.more, "causes": dict(loss.causes)}
            for loss in runners_up(found)
        ],
        "order": [layer.name for layer in layers],
        "plan": found.plan.to_json(),
    }


def _limit(memory: float) -> float | None:
    return None if memory == float("inf") else memory
