"""Sharded state of replicas (ZeRO): each replica keeps the optimizer's state, and the summed gradients, of its rows of
every parameter alone.

A parameter is divided along its first dimension, as evenly as can be. A replica's shard is a view of its own rows, so
an optimizer that steps the shard steps these rows of the parameter. Then the replicas give each other their rows.
Only optimizers that treat every element alone give the numbers of one process so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from penstock.comm.collectives.interface import Pending, Reducer
from penstock.engine.replica_rows import part_of
from penstock.errors import InputError

ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "Adamax", "ASGD")
)
BUCKET = 8 << 20  # bytes of weights that are gathered together: so much is needed besides


class Shard(StrEnum):
    """State that replicas divide; each level includes the ones before."""

    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"


@dataclass(frozen=True)
class DividedSum:
    """A sum of gradients under way: the parameters, and where its parts lie."""

    parameters: list[nn.Parameter]
    pending: Pending


class ShardedState:
    """Shards of the parameters of this process's stages; `reducer` reaches the other replicas."""

    def __init__(self, level: Shard, reducer: Reducer, replica: int, owned: dict[int, dict[str, nn.Parameter]]) -> None:
        self.level, self.reducer, self.replica = level, reducer, replica
        self.replicas = len(reducer.ranks)
        self.shards: dict[nn.Parameter, nn.Parameter] = {}
        self.owned: dict[int, dict[str, nn.Parameter]] = {}
        for stage, parameters in owned.items():
            self.owned[stage] = {name: self._shard(parameter) for name, parameter in parameters.items()}
        self.whole = {shard: parameter for parameter, shard in self.shards.items()}

    def rows(self, tensor: Tensor) -> Tensor:
        """Return this replica's rows of a tensor, as a view."""
        return _rows(tensor, self.replicas, self.replica)

    def reduce(self, gradients: dict[nn.Parameter, Tensor]) -> list[DividedSum]:
        """Begin to sum gradients of which each replica wants its rows alone."""
        started = []
        for parameters in _by_type(gradients):
            flat, bounds = self._packed([gradients[parameter] for parameter in parameters])
            started.append(DividedSum(parameters, self.reducer.reduce_scatter(flat, bounds)))
        return started

    def reduced(self, started: Iterable[DividedSum]) -> dict[nn.Parameter, Tensor]:
        """Return this replica's rows of the sums, by shard."""
        sums: dict[nn.Parameter, Tensor] = {}
        for one in started:
            (part,) = one.pending.wait()
            shards = [self.shards[parameter] for parameter in one.parameters]
            at = 0
            for shard in shards:
                sums[shard] = part[at : at + shard.numel()].view(shard.shape)
                at += shard.numel()
        return sums

    def sliced(self, gradients: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return the gradients of shards in place of those of whole parameters."""
        return {
            self.shards.get(parameter, parameter): self.rows(total) if parameter in self.shards else total
            for parameter, total in gradients.items()
        }

    def take_own_gradients(self) -> None:
        """Give the shards their rows of what `.grad` of parameters holds from outside the step."""
        for parameter, shard in self.shards.items():
            shard.grad = None if parameter.grad is None else self.rows(parameter.grad)

    def clear_own_gradients(self) -> None:
        """Forget what `.grad` of parameters held, which an update takes in."""
        for parameter in self.shards:
            parameter.grad = None

    def gather(self, stage: int) -> None:
        """Have all replicas' rows of a stage's weights after an update."""
        parameters = [self.whole[shard] for shard in self.owned[stage].values() if shard in self.whole]
        with torch.no_grad():
            for bucket in _buckets(parameters):
                for parameter, whole in zip(bucket, self.gathered([p.detach() for p in bucket]), strict=True):
                    for replica in range(self.replicas):
                        if replica != self.replica:
                            own = _rows(parameter.detach(), self.replicas, replica)
                            own.copy_(_rows(whole, self.replicas, replica))

    def gathered(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of which each replica has given its rows, whole. Every replica has to call, with tensors of
        the same shapes."""
        flat, bounds = self._packed(tensors)
        own = flat[bounds[self.replica] : bounds[self.replica + 1]].clone()
        self.reducer.all_gather(own, flat, bounds).wait()
        whole = [torch.empty_like(tensor) for tensor in tensors]
        at = 0
        for replica in range(self.replicas):
            for tensor in whole:
                rows = _rows(tensor, self.replicas, replica)
                rows.copy_(flat[at : at + rows.numel()].view(rows.shape))
                at += rows.numel()
        return whole

    def state_whole(self, shard: nn.Parameter, value: Tensor) -> Tensor:
        """Return what an optimizer keeps for a shard, for the whole parameter. Every replica has to call."""
        if value.shape != shard.shape:
            return value  # a number of steps, which is the same everywhere
        whole = self.whole[shard]
        filled = torch.zeros(whole.shape, dtype=value.dtype, device=value.device)
        self.rows(filled).copy_(value)
        return self.gathered([filled])[0]

    def state_part(self, shard: nn.Parameter, value: Tensor) -> Tensor:
        """Return this replica's rows of what an optimizer keeps for a whole parameter."""
        return self.rows(value).clone() if value.shape == self.whole[shard].shape else value

    def _shard(self, parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.dim():
            return parameter  # a single number: each replica steps it
        if parameter not in self.shards:
            rows = self.rows(parameter.detach())
            self.shards[parameter] = nn.Parameter(rows, requires_grad=parameter.requires_grad)
        return self.shards[parameter]

    def _packed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """Return tensors as one, replica after replica, and where each replica's part begins."""
        parts = [[_rows(t, self.replicas, replica).reshape(-1) for t in tensors] for replica in range(self.replicas)]
        bounds = [0]
        for part in parts:
            bounds.append(bounds[-1] + sum(piece.numel() for piece in part))
        return torch.cat([piece for part in parts for piece in part]), bounds


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that looks at a whole parameter, of which a replica has some rows alone."""
    kind = type(optimizer)
    if kind.__name__ not in ELEMENTWISE or not kind.__module__.startswith("torch.optim"):
        raise InputError(
            "an optimizer that treats every element alone where shard= divides parameters between replicas",
            f"{kind.__name__}, which is not known to",
            f"use one of torch's own ({', '.join(sorted(ELEMENTWISE))}), or leave shard out",
        )


def _rows(tensor: Tensor, replicas: int, replica: int) -> Tensor:
    first, last = part_of(tensor.shape[0], replicas, replica)
    return tensor[first:last]


def _by_type(gradients: dict[nn.Parameter, Tensor]) -> list[list[nn.Parameter]]:
    types: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter, gradient in gradients.items():
        types.setdefault(gradient.dtype, []).append(parameter)
    return list(types.values())


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return parameters in groups of one type and about BUCKET bytes."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in sorted(parameters, key=lambda one: str(one.dtype)):
        if not buckets or size >= BUCKET or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets
