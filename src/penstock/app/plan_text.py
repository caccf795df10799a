"""A plan as people read it: stages, step, memory, traffic, and why."""

from __future__ import annotations

from penstock.app.plan_fit import changes_that_fit
from penstock.app.plan_why import (
    asynchronous,
    less_than_a_row,
    not_yet,
    passed_over,
    proof,
    runners_up,
    slower,
    traffic,
)
from penstock.errors import InputError
from penstock.planners.prediction import Prediction


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
