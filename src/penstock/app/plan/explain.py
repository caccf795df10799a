"""The explanation of a plan: its bottleneck, its traffic by link, and why each runner-up is slower."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.app.plan.predict import predict
from penstock.core.action import Op
from penstock.core.plan import Plan
from penstock.planners.outcome import PlanOutcome, Runner, Searched
from penstock.planners.prediction import Prediction
from penstock.simulator.breakdown import breakdown
from penstock.training.runnable_plans import refusal

MOST = 6  # runners-up that are explained
LARGE = 4096  # slots x micro-batches above which only the time is given


@dataclass(frozen=True)
class RunnerUp:
    """A plan that was not chosen: by how much it is slower, as a share, and for which causes."""

    name: str
    plan: Plan
    step_seconds: float
    more: float
    causes: tuple[tuple[str, float], ...]  # as shares of the better plan's step, the largest first

    def __str__(self) -> str:
        where = ", ".join(f"{cause} {share:+.1%}" for cause, share in self.causes if abs(share) >= 0.0005)
        shape = ":".join(map(str, self.plan.replicas[:12])) + (":..." if self.plan.ranks > 12 else "")
        return f"{self.name} ({shape}) {self.more:+.1%}" + (f" ({where})" if where else "")


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step: from one stage to another in each direction, or of a stage's reduction on each device."""

    what: str
    bytes: float
    level: str
    seconds: float  # of the busiest link


def is_large(plan: Plan) -> bool:
    return len(plan.slots) * plan.microbatches > LARGE


def causes(prediction: Prediction) -> dict[str, float]:
    """Return the seconds of one step by cause."""
    line = prediction.timeline
    assert line.costs is not None  # a prediction has them
    batches = line.schedule.shape.batches
    return {name: part / batches for name, part in breakdown(line.schedule, line.costs).to_json().items()}


def runner_up(best: Prediction, other: Prediction, name: str) -> RunnerUp:
    """Return how much slower another plan of the same batch is than the best."""
    scale = best.rows / other.rows
    step = other.step_seconds * scale
    parts: list[tuple[str, float]] = []
    if not is_large(other.plan):
        best_causes, other_causes = causes(best), causes(other)
        shares = {
            cause: (other_causes[cause] * scale - best_causes[cause]) / best.step_seconds for cause in best_causes
        }
        parts = sorted(shares.items(), key=lambda item: -abs(item[1]))[:2]
    return RunnerUp(name, other.plan, step, step / best.step_seconds - 1, tuple(parts))


def runners_up(prediction: Prediction) -> list[RunnerUp]:
    """Return the best plan of every other schedule that the search has considered."""
    outcome = prediction.outcome
    if not isinstance(outcome, Searched):
        return []
    others = [runner for runner in outcome.runners if runner.plan != prediction.plan][:MOST]
    return [_predict_runner(prediction, outcome, runner) for runner in others]


def _predict_runner(prediction: Prediction, outcome: Searched, runner: Runner) -> RunnerUp:
    if is_large(runner.plan):  # its seconds are known, and causes are not given
        return RunnerUp(runner.method, runner.plan, runner.seconds, runner.seconds / outcome.seconds - 1, ())
    other = predict(PlanOutcome("search", runner.plan, runner.profile, runner.seconds), prediction.cluster)
    return runner_up(prediction, other, runner.method)


def proof(prediction: Prediction) -> str | None:
    """Return how close to optimal the search guarantees its plan to be; None for other methods."""
    outcome = prediction.outcome
    if not isinstance(outcome, Searched):
        return None
    if outcome.exact:
        faster = f"more than {outcome.gap:.1%} faster" if rejected_faster(prediction) else "faster"
        return f"all {outcome.simulated} plans of the schedules that were searched were simulated: none is {faster}"
    early = ", stopped by the time limit" if outcome.stopped else ""
    return f"no plan can be more than {outcome.gap:.1%} faster ({outcome.simulated} plans simulated{early})"


def rejected_faster(prediction: Prediction) -> str | None:
    """Return the schedules that were slightly faster, and why they were not chosen; None if there are none."""
    outcome = prediction.outcome
    if not isinstance(outcome, Searched):
        return None
    gains = [(runner.method, outcome.seconds / runner.seconds - 1) for runner in outcome.runners if runner.seconds]
    near = [f"{name} {gain:.2%}" for name, gain in gains if gain > 1e-9]
    if not near:
        return None
    return (
        f"faster, but by less than {outcome.margin:.0%}: {', '.join(near)}; "
        "for so little a synchronous schedule is not given up, nor a simpler one"
    )


def delay(prediction: Prediction) -> int:
    """Return by how many updates the weights of a forward are stale at most; 0 for a synchronous plan."""
    schedule, shape = prediction.timeline.schedule, prediction.timeline.schedule.shape
    op, stage, microbatch, version, *_ = schedule.rows.columns()
    # Replicas that take turns update together, once all have had a mini-batch: a version counts one for each replica.
    per_update = shape.stage_replicas[stage] if shape.turns else 1
    late = microbatch // shape.microbatches // per_update - version
    return int(late[op == Op.F].max(initial=0))


def asynchronous(prediction: Prediction) -> str | None:
    """Return a warning about stale weights for a plan without a flush; None for others."""
    most = delay(prediction)
    if not most:
        return None
    return (
        f"asynchronous: gradients are taken from weights that are up to {most} update{'s' if most > 1 else ''} old, so "
        "this trains something else than one device would: the loss may fall more slowly, stall or diverge; "
        "`penstock compare` tells for your model, and docs/convergence.md for others"
    )


def too_few_rows(prediction: Prediction) -> str | None:
    """Return why no batch can be trained by the plan: planners without rows may split a micro-batch below one row. None
    otherwise."""
    rows, most = prediction.outcome.profile.samples, max(prediction.plan.replicas)
    if most <= rows or prediction.timeline.schedule.shape.turns:
        return None
    return f"{most} replicas share micro-batches of {rows} row(s), less than a row each; use larger ones (--microbatch)"


def untrainable(prediction: Prediction) -> str | None:
    """Return why training does not support the plan yet; None if it does."""
    error = refusal(prediction.plan)
    return None if error is None else str(error)


def traffic(prediction: Prediction) -> list[Traffic]:
    """Return the bytes that move in one step, between stages and in reductions."""
    shape, costs, plan = prediction.timeline.schedule.shape, prediction.timeline.costs, prediction.plan
    assert costs is not None
    crossing, first = prediction.outcome.profile.crossing(plan.cuts), shape.neighbours.edge_lane
    moved = []
    for edge, (a, b) in enumerate(shape.edges):
        size = crossing.get((a, b), 0.0) * plan.microbatches
        ends = [plan.devices[plan.placement[s]][0][0] for s in (a, b)]
        if size and ends[0] != ends[1]:
            level = prediction.cluster.levels[prediction.cluster.meeting_level(*ends)].name
            lanes = costs.links.seconds[0, first[edge] : first[edge + 1]]
            busiest = float(lanes.max(initial=0.0)) * plan.microbatches / (max(1, len(lanes)) if shape.turns else 1)
            moved.append(Traffic(f"stage {a} to {b}, and as much back", size, level, busiest))
    for s, rank in enumerate(plan.placement):
        members = [slot[0] for slot in plan.devices[rank]]
        if len(members) > 1:
            high = max(prediction.cluster.meeting_level(members[0], other) for other in members[1:])
            rounds = len(members) if shape.turns else 1  # replicas that take turns reduce once a round
            size = 2 * (len(members) - 1) / len(members) * float(costs.footprint.gradients[s]) / rounds
            moved.append(
                Traffic(
                    f"reduction of stage {s}, each device",
                    size,
                    prediction.cluster.levels[high].name,
                    float(costs.reduce[s]) / rounds,
                )
            )
    return moved
