"""Read the plan that a Pipeline is given: a planner's result, its JSON, or a file.

A plan determines stages, cuts, chunks, schedule and micro-batches, so none of these may be given beside it. A plan that
the engine cannot run is refused here, before the model is changed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from penstock.core.json_file import read_json
from penstock.core.plan import Plan
from penstock.core.shape import Shape
from penstock.core.text_profile import NUMBER
from penstock.errors import FormatError, InputError
from penstock.planners.prediction import Prediction
from penstock.training.staleness import NAMES as MITIGATIONS

ITS_OWN = ("stages", "cuts", "chunks", "replicas", "schedule", "microbatches")  # what a plan says
WRITE = "write it with `penstock plan --json`"


@dataclass(frozen=True)
class Planned:
    """A plan that the engine can run. `order` names the layers that it counts, where that is known."""

    plan: Plan
    order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        widest = max(map(len, self.plan.slots))
        if widest > 1:
            expected = "a plan with one device in each tensor group, which is all that can be run so far"
            raise InputError(expected, widest, "plan again by penstock plan")

    @property
    def processes(self) -> tuple[int, ...]:
        """The process of every slot: process r runs what the plan has on the r-th device that it uses.

        Replicas of a stage are alike, so the first of them is the one on the first of their devices.
        """
        used = sorted(device for (device,) in self.plan.slots)
        number = {device: at for at, device in enumerate(used)}
        return tuple(at for rank in self.plan.devices for at in sorted(number[device] for (device,) in rank))

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the schedule's options and the staleness mitigation given beside the plan."""
        own = [name for name in given if name not in MITIGATIONS]
        if own:
            raise InputError("no options of the schedule beside a plan", ", ".join(own), "leave them out")
        return dict(self.plan.options) | given

    def cuts(self, layers: Sequence[str]) -> list[str]:
        """Return the modules at which the second, third, ... stage begins, in a model of these layers."""
        count = self.plan.stages[-1].last + 1
        if count != len(layers):
            raise InputError(
                f"a plan of the model's {len(layers)} layers", f"one of {count}", "profile and plan this very model"
            )
        if self.order and self.order != tuple(layers):
            self._require_names(layers)
        return [layers[first] for first in self.plan.cuts]

    def _require_names(self, layers: Sequence[str]) -> None:
        """Raise for the layers of another model. Names in a text profile are not compared, as they are its own."""
        pairs = enumerate(zip_longest(self.order, layers))
        at, (planned, called) = next((at, names) for at, names in pairs if names[0] != names[1])
        came = f"layer {at} is {planned!r} in the plan and {called!r} in the model"
        if sorted(self.order) == sorted(layers):
            expected = "a plan that takes the layers in the order in which the model calls them"
            raise InputError(expected, came, 'plan by another method, or with graph="chain"')
        if not all(NUMBER.fullmatch(name.partition(" ")[0]) for name in self.order):
            raise InputError("a plan of the model's own layers", came, "profile and plan this very model")

    def in_short(self) -> str:
        """Return a short description of the stages, for ranks to compare."""
        return ", ".join(
            f"layers {stage.first} to {stage.last}"
            + (" recomputed" if stage.recompute else "")
            + (" offloaded" if stage.offload else "")
            for stage in self.plan.stages
        )

    def require_fit(self, shape: Shape) -> None:
        """Raise for a plan whose stages are on other ranks than in its schedule."""
        if shape.placement != self.plan.placement:
            raise InputError(
                f"a plan whose stages are on ranks {list(shape.placement)}, as {shape.name} has them",
                list(self.plan.placement),
                "correct the plan",
            )


def read_plan(given: object) -> Planned:
    """Return a plan from any form that it may be given in."""
    if isinstance(given, Prediction):
        return Planned(given.plan, tuple(layer.name for layer in given.outcome.profile.layers))
    if isinstance(given, Plan):
        return Planned(given)
    if isinstance(given, dict):
        return _from_json(given)
    if isinstance(given, (str, os.PathLike)):
        return read_json(Path(given), "plan", _from_json, WRITE)
    raise InputError(
        "plan= to be a Plan, what penstock.plan() returns, or the path of its JSON", repr(given)[:60], WRITE
    )


def require_alone(given: dict[str, Any]) -> None:
    """Raise for options given beside a plan that determines them; None means not given."""
    twice = [name for name in ITS_OWN if given.get(name) is not None]
    if twice:
        raise InputError(f"plan= alone, which says {', '.join(ITS_OWN)}", f"{', '.join(twice)} too", "leave out either")


def _from_json(data: Any) -> Planned:
    """Read the JSON that `penstock plan --json` writes, or the plan in it."""
    if not isinstance(data, dict):
        raise FormatError("JSON", "one plan", f"a {type(data).__name__}", "plan by one method, not by all")
    order = data.get("order", [])
    names = tuple(order) if isinstance(order, list) and all(isinstance(name, str) for name in order) else ()
    return Planned(Plan.from_json(data.get("plan", data)), names)
