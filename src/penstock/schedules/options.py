"""The options of the methods, for type checkers; the registry explains each."""

from __future__ import annotations

from typing import TypedDict

from penstock.core.cost import Costs
from penstock.core.validation import Numbers


class NamedOptions(TypedDict, total=False):
    """Options that a Pipeline passes on to the method."""

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
    """Options of `penstock.schedule` and `penstock.loop`."""

    seed: int


class TrainingOptions(NamedOptions, total=False):
    """Options of a Pipeline: the method's, and those of staleness mitigation."""

    t1: int | None
    t2: float | bool | None
    t3: int | None
    predict: str | None
