"""The task of a rank in one reduction."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from penstock.comm.collectives.flat import Flat
from penstock.comm.collectives.rounds import Round


class Kind(Enum):
    REDUCE = "all-reduce"
    SCATTER = "reduce-scatter"
    GATHER = "all-gather"


@dataclass(frozen=True)
class Job:
    """The reduction of tensors of one dtype. `digest`: what all ranks have to agree on."""

    kind: Kind
    dtype: torch.dtype
    source: Flat
    target: Flat
    rounds: list[Round]
    digest: bytes


class Unlike(Exception):
    """Not all ranks have started the same."""
