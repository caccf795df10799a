"""The options of the methods, for type checkers; what each means is said in the registry."""

from __future__ import annotations

from typing import TypedDict

from penstock.core.cost import Costs
from penstock.core.validation import Numbers


class NamedOptions(TypedDict, total=False):
    """Those that a Pipeline hands on."""

    policy: str
    cap: int
    overlap: bool
    stash: bool
    vertical_sync: bool
    forward: Numbers
    input_grad: Numbers
    weight_grad: Numbers
    transfer: Numbers
    weight_grad_memory: float
    memory: Numbers
    costs: Costs
    placement: str
    effort: int


class MethodOptions(NamedOptions, total=False):
    """Those of `penstock.schedule` and `penstock.loop`."""

    seed: int


class TrainingOptions(NamedOptions, total=False):
    """Those of a Pipeline: the method's, and remedies against stale weights."""

    t1: int | None
    t2: float | bool | None
    t3: int | None
    predict: str | None
