"""Weights that several stages use: their gradients are added on the stage that owns them, stage by stage from the first
to the last, and after its update the others get the new weights.

One stage owns a weight and its optimizer's state. Stages of one process share the weight itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import nn

from penstock.engine.lanes import Lanes
from penstock.engine.transport.lane import Key, LaneName, Message
from penstock.model.stage import Stage

GRADIENTS, WEIGHTS = -1, -2  # in place of a micro-batch's number


@dataclass(frozen=True)
class Tie:
    """One weight: the stage that owns it comes first among those that use it."""

    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]

    @property
    def owner(self) -> int:
        return self.stages[0]


class Ties:
    """All tied weights of a model, seen from one process."""

    def __init__(self, ties: list[Tie], stages: list[Stage], lanes: Lanes | None = None) -> None:
        self.ties, self.lanes = ties, lanes
        self.stages = {stage.index: stage for stage in stages}
        self.runs = count(1)

    def collect(self) -> dict[nn.Parameter, torch.Tensor]:
        """The gradients of tied weights that stages here own."""
        run = next(self.runs)
        for (owner, user), shared in self._pairs():
            if user in self.stages and owner not in self.stages:
                parts = self.stages[user].parts
                mine = {at: parts[tie.parameter] for at, tie in shared.items() if tie.parameter in parts}
                self._send(LaneName(user, owner), Key(run, GRADIENTS), mine)
        far = {
            (user, at): gradient
            for (owner, user), _ in self._pairs()
            if owner in self.stages and user not in self.stages
            for at, gradient in self._receive(LaneName(user, owner), Key(run, GRADIENTS)).items()
        }
        found = self._added(far)
        for stage in self.stages.values():
            stage.parts.clear()
        return found

    def spread(self) -> None:
        """After an update: the new weights to whoever has a copy."""
        run = next(self.runs)
        for (owner, user), shared in self._pairs():
            name = LaneName(owner, user)
            if owner in self.stages and user not in self.stages:
                self._send(name, Key(run, WEIGHTS), {at: tie.parameter.detach() for at, tie in shared.items()})
            elif user in self.stages and owner not in self.stages:
                with torch.no_grad():
                    for at, weight in self._receive(name, Key(run, WEIGHTS)).items():
                        self.ties[at].parameter.copy_(weight)

    def _added(self, far: dict[tuple[int, int], torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
        found: dict[nn.Parameter, torch.Tensor] = {}
        for at, tie in enumerate(self.ties):
            if tie.owner not in self.stages:
                continue
            for stage in tie.stages:
                mine = self.stages.get(stage)
                part = far.get((stage, at)) if mine is None else mine.parts.get(tie.parameter)
                if part is not None:
                    known = found.get(tie.parameter)
                    found[tie.parameter] = self._home(part, tie) if known is None else known + self._home(part, tie)
        return found

    def _home(self, part: torch.Tensor, tie: Tie) -> torch.Tensor:
        return part.to(tie.parameter.device)

    def _pairs(self) -> Iterator[tuple[tuple[int, int], dict[int, Tie]]]:
        """Owner and user, and the weights they share: in one order everywhere."""
        pairs: dict[tuple[int, int], dict[int, Tie]] = {}
        for at, tie in enumerate(self.ties):
            for user in tie.stages[1:]:
                pairs.setdefault((tie.owner, user), {})[at] = tie
        yield from sorted(pairs.items(), key=lambda item: item[0])

    def _send(self, name: LaneName, key: Key, values: dict[int, torch.Tensor]) -> None:
        assert self.lanes is not None
        self.lanes.senders[name].send(key, Message(values))

    def _receive(self, name: LaneName, key: Key) -> dict[int, torch.Tensor]:
        assert self.lanes is not None
        return self.lanes.receivers[name].receive(key).values
