"""What is known before the workers start: a profile and a cluster, each measured by processes of its own; plans for
every schedule; and what the simulator says of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from benchmarks.truth.measuring import Measuring
from benchmarks.workers.team import Team
from penstock import Cluster, Plan, Profile, StagePlan, read_cluster, schedule
from penstock.app.plan.predict import predict
from penstock.planners.balance import even_cells
from penstock.planners.outcome import PlanOutcome
from penstock.planners.prediction import Prediction
from penstock.profiler.combine import combine_profiles

RANKS = 2
SAMPLES = 6  # of a profile
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "pipedream", "2bw", "pipemare")


def measure_cluster(folder: Path) -> Cluster:
    """What joins two local workers."""
    file = folder / "cluster.toml"
    with Team(RANKS, Measuring) as team:
        file.write_text(team.ask("cluster")[0])
    return read_cluster(file)


def measure_model(name: str, folder: Path) -> Profile:
    """Its layers, by as many processes at once as there will be workers."""
    with Team(RANKS, Measuring) as team:
        found = combine_profiles([Profile.from_json(one) for one in team.ask("profile", name, SAMPLES)])
    (folder / f"{name}.profile.json").write_text(json.dumps(found.to_json()))
    return found


def plan(profile: Profile, name: str, microbatches: int) -> Plan:
    """Pieces as equal as the layers allow, where the schedule has them."""
    shape = schedule(name, stages=RANKS, microbatches=microbatches).shape
    bounds, _ = even_cells([layer.seconds for layer in profile.layers], shape.stages)
    stages = tuple(StagePlan(first, last - 1) for first, last in pairwise(bounds))
    return Plan(stages, shape.placement, tuple(((rank,),) for rank in range(RANKS)), name, microbatches)


def foresee(profile: Profile, cluster: Cluster, name: str, microbatches: int) -> Prediction:
    return predict(PlanOutcome("balance", plan(profile, name, microbatches), profile, 0.0), cluster)


def write_plan(found: Prediction, file: Path) -> str:
    """For the workers, which read it as any user's would."""
    order = [layer.name for layer in found.outcome.profile.layers]
    file.write_text(json.dumps({"plan": found.plan.to_json(), "order": order}))
    return str(file)
