"""Why a plan: what limits it, what moves over which links, and what each runner-up loses and where."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.app.plan.predict import predict
from penstock.core.action import Op
from penstock.core.plan import Plan
from penstock.planners.outcome import PlanOutcome, Runner, Searched
from penstock.planners.prediction import Prediction
from penstock.simulator.breakdown import breakdown

MOST = 6  # runners-up that are looked into
LARGE = 4096  # slots x micro-batches above which only their times are told


@dataclass(frozen=True)
class Loss:
    """A plan that was not taken: how much longer it takes, as a share, and which causes that comes from."""

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
class Moved:
    """Bytes of one step: of one stage's output to another, each way, or of a stage's reduction on each device."""

    what: str
    bytes: float
    level: str
    seconds: float  # that the busiest link is taken


def is_large(plan: Plan) -> bool:
    return len(plan.slots) * plan.microbatches > LARGE


def causes(found: Prediction) -> dict[str, float]:
    """Seconds of one step by cause."""
    line = found.timeline
    assert line.costs is not None  # a prediction has them
    batches = line.schedule.shape.batches
    return {name: part / batches for name, part in breakdown(line.schedule, line.costs).to_json().items()}


def slower(best: Prediction, other: Prediction, name: str) -> Loss:
    """What another plan of the same batch loses."""
    scale = best.rows / other.rows
    step = other.step_seconds * scale
    parts: list[tuple[str, float]] = []
    if not is_large(other.plan):
        ours, theirs = causes(best), causes(other)
        shares = {cause: (theirs[cause] * scale - ours[cause]) / best.step_seconds for cause in ours}
        parts = sorted(shares.items(), key=lambda item: -abs(item[1]))[:2]
    return Loss(name, other.plan, step, step / best.step_seconds - 1, tuple(parts))


def runners_up(found: Prediction) -> list[Loss]:
    """The best plan of every other schedule that the search has looked at."""
    outcome = found.outcome
    if not isinstance(outcome, Searched):
        return []
    others = [runner for runner in outcome.runners if runner.plan != found.plan][:MOST]
    return [_runner_up(found, outcome, runner) for runner in others]


def _runner_up(found: Prediction, outcome: Searched, runner: Runner) -> Loss:
    if is_large(runner.plan):  # its seconds are known, and more would not be told
        return Loss(runner.method, runner.plan, runner.seconds, runner.seconds / outcome.seconds - 1, ())
    other = predict(PlanOutcome("search", runner.plan, runner.profile, runner.seconds), found.cluster)
    return slower(found, other, runner.method)


def proof(found: Prediction) -> str | None:
    """How good the search can say that its answer is."""
    outcome = found.outcome
    if not isinstance(outcome, Searched):
        return None
    if outcome.exact:
        faster = f"more than {outcome.gap:.1%} faster" if passed_over(found) else "faster"
        return f"all {outcome.simulated} plans of the schedules that were searched were simulated: none is {faster}"
    early = ", stopped by the time limit" if outcome.stopped else ""
    return f"no plan can be more than {outcome.gap:.1%} faster ({outcome.simulated} plans simulated{early})"


def passed_over(found: Prediction) -> str | None:
    """Which schedules would have been a little faster, and why they were not taken."""
    outcome = found.outcome
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


def delay(found: Prediction) -> int:
    """How many updates old the weights of a forward are at most; 0 for a synchronous plan."""
    schedule, shape = found.timeline.schedule, found.timeline.schedule.shape
    op, stage, microbatch, version, *_ = schedule.rows.columns()
    # Replicas that take turns update together, once all have had a mini-batch: a version holds as many as they are.
    per_update = shape.stage_replicas[stage] if shape.turns else 1
    late = microbatch // shape.microbatches // per_update - version
    return int(late[op == Op.F].max(initial=0))


def asynchronous(found: Prediction) -> str | None:
    """What a plan without a flush may cost."""
    most = delay(found)
    if not most:
        return None
    return (
        f"asynchronous: gradients are taken from weights that are up to {most} update{'s' if most > 1 else ''} old, so "
        "this trains something else than one device would: the loss may fall more slowly, stall or diverge; "
        "`penstock compare` tells for your model, and docs/convergence.md for others"
    )


def less_than_a_row(found: Prediction) -> str | None:
    """Why no batch could be trained so: a planner that knows no rows splits micro-batches at will."""
    rows, most = found.outcome.profile.samples, max(found.plan.replicas)
    if most <= rows or found.timeline.schedule.shape.turns:
        return None
    return f"{most} replicas share micro-batches of {rows} row(s), less than a row each; use larger ones (--microbatch)"


def not_yet(found: Prediction) -> str | None:
    """Why no batch can be trained so with what training knows so far."""
    most = max(found.plan.replicas)
    if most == 1:
        return None
    return f"a stage has {most} replicas, and training knows one so far; search with --replicas 1 plans so"


def traffic(found: Prediction) -> list[Moved]:
    """What moves in one step, between stages and in reductions."""
    shape, costs, plan = found.timeline.schedule.shape, found.timeline.costs, found.plan
    assert costs is not None
    crossing, first = found.outcome.profile.crossing(plan.cuts), shape.neighbours.edge_lane
    moved = []
    for edge, (a, b) in enumerate(shape.edges):
        size = crossing.get((a, b), 0.0) * plan.microbatches
        ends = [plan.devices[plan.placement[s]][0][0] for s in (a, b)]
        if size and ends[0] != ends[1]:
            level = found.cluster.levels[found.cluster.meeting_level(*ends)].name
            lanes = costs.links.seconds[0, first[edge] : first[edge + 1]]
            busiest = float(lanes.max(initial=0.0)) * plan.microbatches / (max(1, len(lanes)) if shape.turns else 1)
            moved.append(Moved(f"stage {a} to {b}, and as much back", size, level, busiest))
    for s, rank in enumerate(plan.placement):
        members = [slot[0] for slot in plan.devices[rank]]
        if len(members) > 1:
            high = max(found.cluster.meeting_level(members[0], other) for other in members[1:])
            rounds = len(members) if shape.turns else 1  # replicas that take turns reduce once a round
            size = 2 * (len(members) - 1) / len(members) * float(costs.footprint.gradients[s]) / rounds
            moved.append(
                Moved(
                    f"reduction of stage {s}, each device",
                    size,
                    found.cluster.levels[high].name,
                    float(costs.reduce[s]) / rounds,
                )
            )
    return moved
