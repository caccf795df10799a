"""Weights that several stages use: the first of the stages owns them, and weights with the same stages form a group.

Gradients are added on the owner's stage, from the first stage to the last. A backward ends there, so when the owner has
its own gradients of a mini-batch, those of the others have been sent. After an update, the new weights are sent to the
processes that have a copy, each version once and in order. Stages of one process share the weight itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.comm.transport.interface import LaneName, Lanes, Message, MessageKey
from penstock.model.stage import Stage

GRADIENTS, WEIGHTS = 0, 1
FIRST = -3  # used in place of micro-batch numbers, downwards

Parts = dict[int, Tensor]  # by the weight's place in its group


@dataclass(frozen=True, eq=False)
class TieGroup:
    """Weights with the same stages; the first stage owns them."""

    number: int
    stages: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def owner(self) -> int:
        return self.stages[0]


def tie_groups(ties: Iterable[tuple[nn.Parameter, tuple[int, ...]]]) -> list[TieGroup]:
    """Return the groups of tied weights, the same in the same order on every rank."""
    by_stages: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter, stages in ties:
        by_stages.setdefault(stages, []).append(parameter)
    return [TieGroup(at, stages, tuple(by_stages[stages])) for at, stages in enumerate(sorted(by_stages))]


class TiedWeights:
    """Transfers of tied gradients and weights between the stages of a group, within this process or not.

    With `replicas` of the stages, each replica of the owner has a separate connection to each user: `replica` of this
    process's stages exchanges with the first one that it has rows in common with.
    """

    def __init__(
        self,
        groups: list[TieGroup],
        here: Container[int],
        lanes: Lanes | None,
        replicas: Sequence[int] = (),
        replica: int = 0,
    ) -> None:
        self.groups, self.here, self.lanes = groups, here, lanes
        self.replicas, self.replica = replicas, replica
        self.sent: Counter[tuple[LaneName, int, int]] = Counter()
        self.received: Counter[tuple[LaneName, int, int]] = Counter()
        self.local: dict[tuple[int, int, int], Parts] = {}  # gradients, by group, stage and mini-batch

    def send_gradients(self, stage: Stage, mini_batch: int, dense: bool = False) -> None:
        """Send a stage's gradients of weights that it does not own to their owners."""
        for group in self.groups:
            if stage.index in group.stages[1:]:
                parts = _take_parts(stage, group, dense)
                if group.owner in self.here:
                    self.local[group.number, stage.index, mini_batch] = parts
                else:
                    for lane in self._outgoing(stage.index, group.owner):
                        self._send(lane, group, GRADIENTS, _dense(parts))

    def collect_gradients(self, stage: Stage, mini_batch: int, dense: bool = False) -> dict[nn.Parameter, Tensor]:
        """Return the gradients of a mini-batch for the weights that a stage owns, added over all stages."""
        total: dict[nn.Parameter, Tensor] = {}
        for group in self.groups:
            if stage.index != group.owner:
                continue
            for user in group.stages:
                own = user == stage.index
                parts = _take_parts(stage, group, dense) if own else self._gradients(group, user, mini_batch)
                for at, part in parts.items():
                    parameter = group.parameters[at]
                    part = part.to(parameter.device)
                    total[parameter] = _sum(total[parameter], part) if parameter in total else part
        return total

    def owned_elsewhere(self) -> Iterator[tuple[TieGroup, int]]:
        """Yield each group with a copy in this process whose owner is in another, and the stage of the copy."""
        for group in self.groups:
            if group.owner not in self.here:
                yield from ((group, user) for user in group.stages[1:] if user in self.here)

    def send_weights(self, group: TieGroup, copied: bool = True) -> None:
        """Send the owner's new weights to the processes that have a copy; `copied` where an update may come before they
        are received."""
        for user in group.stages[1:]:
            if user not in self.here:
                weights = [p.detach().clone() if copied else p.detach() for p in group.parameters]
                for lane in self._outgoing(group.owner, user):
                    self._send(lane, group, WEIGHTS, dict(enumerate(weights)))

    def receive_weights(self, group: TieGroup, user: int) -> list[Tensor]:
        """Return the next version of a copy."""
        weights = self._receive(self._incoming(group.owner, user), group, WEIGHTS)
        return [weights[at] for at in range(len(group.parameters))]

    def forget(self) -> None:
        """Discard gradients of an interrupted run."""
        self.local.clear()

    def _gradients(self, group: TieGroup, user: int, mini_batch: int) -> Parts:
        if user in self.here:
            return self.local.pop((group.number, user, mini_batch))
        return self._receive(self._incoming(user, group.owner), group, GRADIENTS)

    def _outgoing(self, source: int, target: int) -> list[LaneName]:
        """Return the lanes to those replicas of another stage that hear from this one."""
        if not self.replicas:
            return [LaneName(source, target)]
        ours, theirs = self.replicas[source], self.replicas[target]
        return [LaneName(source, target, self.replica, j) for j in range(theirs) if j * ours // theirs == self.replica]

    def _incoming(self, source: int, target: int) -> LaneName:
        """Return the lane from the replica of another stage that this one hears from."""
        if not self.replicas:
            return LaneName(source, target)
        giver = self.replica * self.replicas[source] // self.replicas[target]
        return LaneName(source, target, giver, self.replica)

    def _send(self, name: LaneName, group: TieGroup, kind: int, values: Parts) -> None:
        assert self.lanes is not None
        place = (name, group.number, kind)
        self.sent[place] += 1
        self.lanes.senders[name].send(_key(self.sent[place], group, kind), Message(values))

    def _receive(self, name: LaneName, group: TieGroup, kind: int) -> Parts:
        assert self.lanes is not None
        place = (name, group.number, kind)
        self.received[place] += 1
        values = self.lanes.receivers[name].receive(_key(self.received[place], group, kind)).values
        return {at: tensor.to(group.parameters[at].device) for at, tensor in values.items()}


def _key(count: int, group: TieGroup, kind: int) -> MessageKey:
    return MessageKey(count, FIRST - 2 * group.number - kind)


def _take_parts(stage: Stage, group: TieGroup, dense: bool) -> Parts:
    parts = {at: stage.parts.pop(p) for at, p in enumerate(group.parameters) if p in stage.parts}
    return _dense(parts) if dense else parts


def _dense(parts: Parts) -> Parts:
    return {at: part.to_dense() if part.layout is not torch.strided else part for at, part in parts.items()}


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """Add the gradients of two stages; a sparse one is made dense if the other is dense."""
    if first.layout is not second.layout:
        first, second = (one.to_dense() if one.layout is not torch.strided else one for one in (first, second))
    return first + second
