"""penstock: train a PyTorch model as a pipeline across devices.

    import penstock

    plan = penstock.schedule("1f1b", stages=4, microbatches=8)
    line = penstock.simulate(plan, forward=1.0, input_grad=1.0, weight_grad=1.0, transfer=0.1)
    print(line.makespan, line.bubble)

Names are imported on first use, so that a simulation does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.app.plan.command import plan, read_profile
    from penstock.app.plan.register import register_schedule
    from penstock.app.profile.api import profile
    from penstock.app.profile.estimate import estimate
    from penstock.comm.transport.registered import register_transport
    from penstock.core.action import Action, Op
    from penstock.core.check import check
    from penstock.core.cluster import Cluster, Device, Level
    from penstock.core.cluster_file import read_cluster
    from penstock.core.cost import Costs
    from penstock.core.faults import Fault, Report
    from penstock.core.loop import Loop
    from penstock.core.lower import lower
    from penstock.core.plan import Plan, StagePlan
    from penstock.core.profile import Layer, Profile
    from penstock.core.schedule import Schedule
    from penstock.core.text import from_csv, to_csv
    from penstock.core.timeline import Timeline
    from penstock.core.torch_text import from_torch_csv, to_torch_csv
    from penstock.errors import FormatError, InputError, PenstockError, RankError, ScheduleError, SplitError
    from penstock.schedules.registry import loop, schedule
    from penstock.schedules.request import ScheduleRequest
    from penstock.simulator.breakdown import Breakdown, breakdown
    from penstock.simulator.simulate import simulate
    from penstock.training.optimizers import muon, nesterov
    from penstock.training.pipeline import Pipeline, Step

__version__ = "0.1.0"

_HOME = {
    "Action": "core.action",
    "Breakdown": "simulator.breakdown",
    "Cluster": "core.cluster",
    "Costs": "core.cost",
    "Device": "core.cluster",
    "Fault": "core.faults",
    "FormatError": "errors",
    "InputError": "errors",
    "Layer": "core.profile",
    "Level": "core.cluster",
    "Loop": "core.loop",
    "Op": "core.action",
    "PenstockError": "errors",
    "Pipeline": "training.pipeline",
    "Plan": "core.plan",
    "Profile": "core.profile",
    "RankError": "errors",
    "Report": "core.faults",
    "Schedule": "core.schedule",
    "ScheduleError": "errors",
    "ScheduleRequest": "schedules.request",
    "SplitError": "errors",
    "StagePlan": "core.plan",
    "Step": "training.pipeline",
    "Timeline": "core.timeline",
    "breakdown": "simulator.breakdown",
    "check": "core.check",
    "estimate": "app.profile.estimate",
    "from_csv": "core.text",
    "from_torch_csv": "core.torch_text",
    "loop": "schedules.registry",
    "lower": "core.lower",
    "muon": "training.optimizers",
    "nesterov": "training.optimizers",
    "plan": "app.plan.command",
    "profile": "app.profile.api",
    "read_cluster": "core.cluster_file",
    "read_profile": "app.plan.command",
    "register_schedule": "app.plan.register",
    "register_transport": "comm.transport.registered",
    "schedule": "schedules.registry",
    "simulate": "simulator.simulate",
    "to_csv": "core.text",
    "to_torch_csv": "core.torch_text",
}

__all__ = [
    "Action",
    "Breakdown",
    "Cluster",
    "Costs",
    "Device",
    "Fault",
    "FormatError",
    "InputError",
    "Layer",
    "Level",
    "Loop",
    "Op",
    "PenstockError",
    "Pipeline",
    "Plan",
    "Profile",
    "RankError",
    "Report",
    "Schedule",
    "ScheduleError",
    "ScheduleRequest",
    "SplitError",
    "StagePlan",
    "Step",
    "Timeline",
    "breakdown",
    "check",
    "estimate",
    "from_csv",
    "from_torch_csv",
    "loop",
    "lower",
    "muon",
    "nesterov",
    "plan",
    "profile",
    "read_cluster",
    "read_profile",
    "register_schedule",
    "register_transport",
    "schedule",
    "simulate",
    "to_csv",
    "to_torch_csv",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(f"penstock.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
