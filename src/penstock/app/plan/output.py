"""A plan as text and as JSON; for one that does not fit its devices, the smallest changes that would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.app.plan.explain import (
    asynchronous,
    delay,
    less_than_a_row,
    not_yet,
    passed_over,
    proof,
    runners_up,
    slower,
    traffic,
)
from penstock.app.plan.predict import predict
from penstock.errors import InputError
from penstock.planners.infeasible import enough
from penstock.planners.prediction import Prediction
from penstock.planners.scaled import scaled
from penstock.schedules.registry import METHODS


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


def as_text(found: Prediction) -> str:
    """One plan."""
    plan = found.plan
    lines = [
        f"{found.outcome.method}: {len(plan.stages)} stage(s) on {plan.ranks} rank(s), schedule {plan.schedule}"
        f"{_options(plan.options)}, {plan.microbatches} micro-batch(es) a step of {found.rows} rows"
    ]
    lines += [_stage_text(found, s) for s in range(len(plan.stages))]
    step, bubble = f"{found.step_seconds:.6g} s, {found.throughput:.6g} rows/s", f"{found.timeline.bubble:.1%}"
    lines.append(f"  step {step}, bubble {bubble}")
    for moved in sorted(traffic(found), key=lambda moved: -moved.seconds)[:4]:
        size, share = f"{moved.bytes / 1e6:.4g} MB a step", moved.seconds / (found.step_seconds or 1.0)
        lines.append(f"  {moved.what}: {size} over {moved.level}, {share:.0%} of the step")
    return "\n".join([*lines, *_reasons(found)])


def _reasons(found: Prediction) -> list[str]:
    causes = "; ".join(f"{what} {share:.0%}" for share, what in found.busy[:3])
    lines = [f"  why: busiest, as a share of the step: {causes}"]
    cost = asynchronous(found)
    if cost is not None:
        lines.append(f"  {cost}")
    told = proof(found)
    if told is not None:
        lines.append(f"  {told}")
    near = passed_over(found)
    if near is not None:
        lines.append(f"  {near}")
    losses = runners_up(found)
    if losses:
        lines.append(f"  runners-up take: {'; '.join(map(str, losses))}")
    split = less_than_a_row(found)
    if split is not None:
        lines.append(f"  cannot be run: {split}")
    later = not_yet(found)
    if later is not None:
        lines.append(f"  cannot be trained yet: {later}")
    for device, missing in sorted(found.over.items(), key=lambda item: -item[1])[:1]:
        lines.append(
            f"  does not fit: device {device} is {missing / 1e9:.3g} GB short, {len(found.over)} device(s) in all"
        )
        lines.append(f"  what would fit: {'; or '.join(map(str, changes_that_fit(found)))}")
    return lines


def all_as_text(every: dict[str, Prediction | InputError]) -> str:
    """Plans of all methods, the fastest of those that fit and can be run first in the table at the end."""
    texts = [f"{name}: {one}" if isinstance(one, InputError) else as_text(one) for name, one in every.items()]
    planned = [one for one in every.values() if not isinstance(one, InputError)]
    fitting = [one for one in planned if not one.over and less_than_a_row(one) is None]
    if fitting:
        ranked = sorted(fitting, key=lambda one: -one.throughput)
        best = ranked[0]
        rows = [f"  {best.outcome.method}: {best.throughput:.6g} rows/s"]
        rows += [f"  {one.throughput:.6g} rows/s: {slower(best, one, one.outcome.method)}" for one in ranked[1:]]
        texts.append("\n".join(["fastest first, with what the others lose:", *rows]))
    return "\n\n".join(texts)


def _options(options: tuple[tuple[str, object], ...]) -> str:
    return f" ({', '.join(f'{name} {value}' for name, value in options)})" if options else ""


def _stage_text(found: Prediction, s: int) -> str:
    stage, layers = found.plan.stages[s], found.outcome.profile.layers
    devices = [device for slot in found.plan.devices[found.plan.placement[s]] for device in slot]
    held, room = max((found.memory[d], found.cluster.devices[d].memory) for d in devices)
    limit = "no limit" if room == float("inf") else f"{room / 1e9:.3g} GB"
    names = f"{layers[stage.first].name[:24]} .. {layers[stage.last].name[:24]}"
    again = ", recomputed" if stage.recompute else ", offloaded" if stage.offload else ""
    return (
        f"  stage {s}: layers {stage.first} to {stage.last} ({names}{again}) on {len(devices)} x device "
        f"{_ranges(devices)}; {held / 1e9:.3g} of {limit}"
    )


def _ranges(devices: list[int]) -> str:
    """0, 1, 2, 5 as 0-2,5."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and runs[-1][-1] + 1 == device:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
