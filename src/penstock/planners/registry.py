"""The planners by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from penstock.core.cluster import Cluster
from penstock.core.profile import Profile
from penstock.errors import InputError
from penstock.planners.balance import balance, gpipe
from penstock.planners.dapple import dapple
from penstock.planners.outcome import Evaluate, PlanOutcome
from penstock.planners.pipedream import pipedream
from penstock.planners.search.find import search
from penstock.planners.two_bw import two_bw


@dataclass(frozen=True)
class Planner:
    """One method: whether it decides for a number of micro-batches, and the options it takes besides."""

    name: str
    find: Callable[..., PlanOutcome]
    summary: str
    batched: bool = True
    scored: bool = False  # by a simulator, which the caller passes as `evaluate` and `confirm`
    asynchronous: bool = False  # its plans have no flush, and train with weights that are some updates old
    options: tuple[str, ...] = ()


PLANNERS = {
    planner.name: planner
    for planner in (
        Planner(
            "search",
            search,
            "every choice together, scored by the simulator of the schedule that will run",
            scored=True,
            options=(
                "schedules",
                "seconds",
                "seed",
                "recompute",
                "whole_rows",
                "fixed",
                "replicas",
                "margin",
                "allow_async",
            ),
        ),
        Planner("balance", balance, "the smallest largest stage, one device each", options=("stages", "schedule")),
        Planner("gpipe", gpipe, "the least variance of the stages", options=("stages", "schedule")),
        Planner(
            "pipedream",
            pipedream,
            "replicated stages for the fastest steady state, level by level",
            batched=False,
            asynchronous=True,
            options=("constant", "graph", "memory"),
        ),
        Planner("dapple", dapple, "the least latency of a synchronous step", options=("keep", "policy")),
        Planner("2bw", two_bw, "width, depth, micro-batch and recompute for two weight versions", asynchronous=True),
    )
}

OPTIONS = tuple(sorted({option for planner in PLANNERS.values() for option in planner.options}))


def find_plan(
    profile: Profile,
    cluster: Cluster,
    method: str,
    microbatches: int,
    judges: Mapping[str, Evaluate] | None = None,
    **options: Any,
) -> PlanOutcome:
    """Return the plan of a named method, for a batch of so many micro-batches of the profile's size.

    `judges` are `evaluate` and `confirm`, for a method that is scored.
    """
    if method not in PLANNERS:
        near = get_close_matches(str(method), PLANNERS, n=1)
        advice = f"try {near[0]}; all are" if near else "choose one of"
        raise InputError("the name of a planner", repr(method), f"{advice} {', '.join(PLANNERS)}")
    planner = PLANNERS[method]
    unknown = sorted(set(options) - set(planner.options))
    if unknown:
        options_of = ", ".join(planner.options) or "none"
        raise InputError(f"options that {method} has ({options_of})", ", ".join(unknown), "leave the others out")
    given: dict[str, Any] = {"microbatches": microbatches} if planner.batched else {}
    if planner.scored:
        given |= judges or {}
    return planner.find(profile, cluster, **given, **options)
