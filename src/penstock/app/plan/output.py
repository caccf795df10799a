"""A plan as text and as JSON; and for one that does not fit its devices, the smallest changes that would make it
fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.app.plan.explain import (
    asynchronous,
    delay,
    proof,
    rejected_faster,
    runner_up,
    runners_up,
    too_few_rows,
    traffic,
    untrainable,
)
from penstock.app.plan.predict import predict
from penstock.errors import InputError
from penstock.planners.infeasible import enough
from penstock.planners.prediction import Prediction
from penstock.planners.scaled import scaled
from penstock.schedules.registry import METHODS


@dataclass(frozen=True)
class Change:
    """A change of the plan, and how much longer a step of the same batch takes with it, as a share; None if unknown."""

    what: str
    more: float | None = None

    def __str__(self) -> str:
        return self.what if self.more is None else f"{self.what} (step {self.more:+.1%})"


def changes_that_fit(prediction: Prediction) -> list[Change]:
    """Return single changes that make the plan fit, the fastest by simulation first; none if it fits."""
    if not prediction.over:
        return []
    tried = [(what, one) for what, one in (*_recomputed(prediction), *_smaller(prediction)) if not one.over]
    step = prediction.step_seconds or 1.0
    costs = [Change(what, one.step_seconds / step - 1) for what, one in tried]
    needed = max(prediction.memory[device] for device in prediction.over)
    return [*sorted(costs, key=lambda change: change.more or 0.0), Change(f"devices of {enough(needed)} GB")]


def _recomputed(prediction: Prediction) -> Iterator[tuple[str, Prediction]]:
    """Yield the plan with recomputation in the stages of devices without enough memory, then in all stages."""
    plan = prediction.plan
    full = {
        rank for rank, slots in enumerate(plan.devices) if any(d in prediction.over for slot in slots for d in slot)
    }
    some = frozenset(s for s, rank in enumerate(plan.placement) if rank in full)
    for chosen in dict.fromkeys((some, frozenset(range(len(plan.stages))))):
        stages = tuple(
            replace(stage, recompute=stage.recompute or s in chosen, offload=stage.offload and s not in chosen)
            for s, stage in enumerate(plan.stages)
        )
        if stages != plan.stages:
            outcome = replace(prediction.outcome, plan=replace(plan, stages=stages))
            named = "all stages" if len(chosen) == len(stages) else f"stage(s) {', '.join(map(str, sorted(chosen)))}"
            one = predict(outcome, prediction.cluster)
            yield f"recompute of {named}", one
            if not one.over:
                return


def _smaller(prediction: Prediction) -> Iterator[tuple[str, Prediction]]:
    """Yield the plan with the largest micro-batches that fit, of the same batch."""
    plan, profile = prediction.plan, prediction.outcome.profile
    for parts in (k for k in range(2, profile.samples + 1) if profile.samples % k == 0):
        outcome = replace(
            prediction.outcome,
            plan=replace(plan, microbatches=plan.microbatches * parts),
            profile=scaled(profile, profile.samples // parts),
        )
        one = predict(outcome, prediction.cluster)
        if not one.over:
            yield f"micro-batches of {profile.samples // parts} row(s) in place of {profile.samples}", one
            return


def as_json(prediction: Prediction) -> dict[str, Any]:
    """Return the plan for scripts. `layers` count in the order of the profile, or of `order` where that is given."""
    layers = prediction.outcome.profile.layers
    return {
        "method": prediction.outcome.method,
        "schedule": prediction.plan.schedule,
        "microbatches": prediction.plan.microbatches,
        "rows": prediction.rows,
        "stages": [
            {
                "layers": [stage.first, stage.last],
                "names": [layers[stage.first].name, layers[stage.last].name],
                "rank": rank,
                "devices": [device for slot in prediction.plan.devices[rank] for device in slot],
                "replicas": len(prediction.plan.devices[rank]),
                "recompute": stage.recompute,
                "offload": stage.offload,
            }
            for stage, rank in zip(prediction.plan.stages, prediction.plan.placement, strict=True)
        ],
        "step_seconds": prediction.step_seconds,
        "throughput": prediction.throughput,
        "bubble": prediction.timeline.bubble,
        "memory": [
            {"device": device, "bytes": held, "limit": _limit(prediction.cluster.devices[device].memory)}
            for device, held in sorted(prediction.memory.items())
        ],
        "fits": not prediction.over,
        "whole_rows": too_few_rows(prediction) is None,
        "trainable": untrainable(prediction) is None,
        "asynchronous": METHODS[prediction.plan.schedule].asynchronous,
        "delay": delay(prediction),
        "would_fit": [asdict(change) for change in changes_that_fit(prediction)],
        "bottleneck": [{"share": share, "what": what} for share, what in prediction.busy[:3]],
        "traffic": [asdict(moved) for moved in traffic(prediction)],
        "proof": proof(prediction),
        "passed_over": rejected_faster(prediction),
        "runners_up": [
            {"schedule": loss.name, "step_seconds": loss.step_seconds, "more": loss.more, "causes": dict(loss.causes)}
            for loss in runners_up(prediction)
        ],
        "order": [layer.name for layer in layers],
        "plan": prediction.plan.to_json(),
    }


def _limit(memory: float) -> float | None:
    return None if memory == float("inf") else memory


def as_text(prediction: Prediction) -> str:
    """Return one plan as text."""
    plan = prediction.plan
    lines = [
        f"{prediction.outcome.method}: {len(plan.stages)} stage(s) on {plan.ranks} rank(s), schedule {plan.schedule}"
        f"{_options(plan.options)}, {plan.microbatches} micro-batch(es) a step of {prediction.rows} rows"
    ]
    lines += [_stage_text(prediction, s) for s in range(len(plan.stages))]
    step, bubble = (
        f"{prediction.step_seconds:.6g} s, {prediction.throughput:.6g} rows/s",
        f"{prediction.timeline.bubble:.1%}",
    )
    lines.append(f"  step {step}, bubble {bubble}")
    for moved in sorted(traffic(prediction), key=lambda moved: -moved.seconds)[:4]:
        size, share = f"{moved.bytes / 1e6:.4g} MB a step", moved.seconds / (prediction.step_seconds or 1.0)
        lines.append(f"  {moved.what}: {size} over {moved.level}, {share:.0%} of the step")
    return "\n".join([*lines, *_reasons(prediction)])


def _reasons(prediction: Prediction) -> list[str]:
    causes = "; ".join(f"{what} {share:.0%}" for share, what in prediction.busy[:3])
    lines = [f"  why: busiest, as a share of the step: {causes}"]
    cost = asynchronous(prediction)
    if cost is not None:
        lines.append(f"  {cost}")
    guarantee = proof(prediction)
    if guarantee is not None:
        lines.append(f"  {guarantee}")
    near = rejected_faster(prediction)
    if near is not None:
        lines.append(f"  {near}")
    losses = runners_up(prediction)
    if losses:
        lines.append(f"  runners-up take: {'; '.join(map(str, losses))}")
    split = too_few_rows(prediction)
    if split is not None:
        lines.append(f"  cannot be run: {split}")
    later = untrainable(prediction)
    if later is not None:
        lines.append(f"  cannot be trained yet: {later}")
    for device, missing in sorted(prediction.over.items(), key=lambda item: -item[1])[:1]:
        lines.append(
            f"  does not fit: device {device} is {missing / 1e9:.3g} GB short, {len(prediction.over)} device(s) in all"
        )
        lines.append(f"  what would fit: {'; or '.join(map(str, changes_that_fit(prediction)))}")
    return lines


def all_as_text(every: dict[str, Prediction | InputError]) -> str:
    """Return the plans of all methods, and a table of those that fit and can be run, the fastest first."""
    texts = [f"{name}: {one}" if isinstance(one, InputError) else as_text(one) for name, one in every.items()]
    planned = [one for one in every.values() if not isinstance(one, InputError)]
    fitting = [one for one in planned if not one.over and too_few_rows(one) is None]
    if fitting:
        ranked = sorted(fitting, key=lambda one: -one.throughput)
        best = ranked[0]
        rows = [f"  {best.outcome.method}: {best.throughput:.6g} rows/s"]
        rows += [f"  {one.throughput:.6g} rows/s: {runner_up(best, one, one.outcome.method)}" for one in ranked[1:]]
        texts.append("\n".join(["fastest first, with what the others lose:", *rows]))
    return "\n\n".join(texts)


def _options(options: tuple[tuple[str, object], ...]) -> str:
    return f" ({', '.join(f'{name} {value}' for name, value in options)})" if options else ""


def _stage_text(prediction: Prediction, s: int) -> str:
    stage, layers = prediction.plan.stages[s], prediction.outcome.profile.layers
    devices = [device for slot in prediction.plan.devices[prediction.plan.placement[s]] for device in slot]
    held, room = max((prediction.memory[d], prediction.cluster.devices[d].memory) for d in devices)
    limit = "no limit" if room == float("inf") else f"{room / 1e9:.3g} GB"
    names = f"{layers[stage.first].name[:24]} .. {layers[stage.last].name[:24]}"
    again = ", recomputed" if stage.recompute else ", offloaded" if stage.offload else ""
    return (
        f"  stage {s}: layers {stage.first} to {stage.last} ({names}{again}) on {len(devices)} x device "
        f"{_ranges(devices)}; {held / 1e9:.3g} of {limit}"
    )


def _ranges(devices: list[int]) -> str:
    """Return 0, 1, 2, 5 as 0-2,5."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and runs[-1][-1] + 1 == device:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
