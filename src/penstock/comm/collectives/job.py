"""One reduction, divided into rounds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from penstock.comm.collectives.flat import Flat
from penstock.comm.collectives.rounds import Round


class ReductionKind(Enum):
    REDUCE = "all-reduce"
    SCATTER = "reduce-scatter"
    GATHER = "all-gather"


@dataclass(frozen=True)
class ReductionJob:
    """A reduction of tensors of one dtype. `digest`: a hash of what has to be equal on all ranks."""

    kind: ReductionKind
    dtype: torch.dtype
    source: Flat
    target: Flat
    rounds: list[Round]
    digest: bytes


class Unlike(Exception):
    """The ranks have started different reductions."""
