"""Weights that several stages use, in training without a flush: weights that the same stages share go together.

The first of the stages owns them. A backward ends there, so when the owner has its own gradients of a mini-batch, those
of the others are on their way or there; they are added stage by stage from the first to the last. The new weights go to
the others at once, each version once and in order, and are taken up when a forward names them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.engine.lanes import Lanes
from penstock.engine.ties import Tie
from penstock.engine.transport.lane import Key, LaneName, Message
from penstock.model.stage import Stage

GRADIENTS, WEIGHTS = 0, 1
FIRST = -3  # numbers in place of a micro-batch's, below those that synchronous training uses

Parts = dict[int, Tensor]  # by the weight's place in its group


@dataclass(frozen=True, eq=False)
class Group:
    """Weights with the same stages; the first one owns them."""

    number: int
    stages: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def owner(self) -> int:
        return self.stages[0]


def grouped(ties: list[Tie]) -> list[Group]:
    """The same groups, in the same order, on every rank."""
    by_stages: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for tie in ties:
        by_stages.setdefault(tie.stages, []).append(tie.parameter)
    return [Group(at, stages, tuple(by_stages[stages])) for at, stages in enumerate(sorted(by_stages))]


class TieMail:
    """What passes between the stages of a group, whether they live in this process or not."""

    def __init__(self, groups: list[Group], here: Container[int], lanes: Lanes | None) -> None:
        self.groups, self.here, self.lanes = groups, here, lanes
        self.sent: Counter[tuple[LaneName, int, int]] = Counter()
        self.received: Counter[tuple[LaneName, int, int]] = Counter()
        self.shelf: dict[tuple[int, int, int], Parts] = {}  # by group, stage and round

    def give(self, stage: Stage, turn: int) -> None:
        """Gradients of a round that a stage made for weights it does not own, to their owners."""
        for group in self.groups:
            if stage.index in group.stages[1:]:
                parts = _taken(stage, group)
                if group.owner in self.here:
                    self.shelf[group.number, stage.index, turn] = parts
                else:
                    self._send(LaneName(stage.index, group.owner), group, GRADIENTS, parts)

    def take(self, stage: Stage, turn: int) -> dict[nn.Parameter, Tensor]:
        """The gradients of a round of all stages, for the weights that a stage owns."""
        found: dict[nn.Parameter, Tensor] = {}
        for group in self.groups:
            if stage.index != group.owner:
                continue
            for user in group.stages:
                parts = _taken(stage, group) if user == stage.index else self._parts(group, user, turn)
                for at, part in parts.items():
                    parameter = group.parameters[at]
                    found[parameter] = found[parameter] + part if parameter in found else part
        return found

    def spread(self, group: Group) -> None:
        """The owner's new weights to the processes that have a copy. A later update must not change what is sent."""
        for user in group.stages[1:]:
            if user not in self.here:
                values = {at: p.detach().clone() for at, p in enumerate(group.parameters)}
                self._send(LaneName(group.owner, user), group, WEIGHTS, values)

    def heard(self, group: Group, user: int) -> list[Tensor]:
        """The next version of a copy."""
        values = self._receive(LaneName(group.owner, user), group, WEIGHTS)
        return [values[at] for at in range(len(group.parameters))]

    def _parts(self, group: Group, user: int, turn: int) -> Parts:
        if user in self.here:
            return self.shelf.pop((group.number, user, turn))
        return self._receive(LaneName(user, group.owner), group, GRADIENTS)

    def _send(self, name: LaneName, group: Group, kind: int, values: Parts) -> None:
        assert self.lanes is not None
        place = (name, group.number, kind)
        self.sent[place] += 1
        self.lanes.senders[name].send(_key(self.sent[place], group, kind), Message(values))

    def _receive(self, name: LaneName, group: Group, kind: int) -> Parts:
        assert self.lanes is not None
        place = (name, group.number, kind)
        self.received[place] += 1
        values = self.lanes.receivers[name].receive(_key(self.received[place], group, kind)).values
        return {at: tensor.to(group.parameters[at].device) for at, tensor in values.items()}


def _key(count: int, group: Group, kind: int) -> Key:
    return Key(count, FIRST - 2 * group.number - kind)


def _taken(stage: Stage, group: Group) -> Parts:
    parts = {at: stage.parts.pop(p) for at, p in enumerate(group.parameters) if p in stage.parts}
    return {at: part.to_dense() if part.layout is not torch.strided else part for at, part in parts.items()}
