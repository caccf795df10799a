"""Replicas of a stage: the sum of their gradients, and what they tell each other at the end of a mini-batch.

Every replica has its part of each micro-batch's rows. At the REDUCE row of a stage the replicas begin to add their
gradients, in the order of the replicas, so that the sum has the same bits on all of them and in one process; on several
hosts within each host first, and over NCCL in an order of its own. The loss, what it was weighed by, and the statistics
of batch norms go from every rank to every other in one message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.comm.collectives.interface import Pending, Reducer
from penstock.comm.world.world import Alone, World
from penstock.engine.replica_rows import in_order
from penstock.engine.stage_executor import StageExecutor
from penstock.errors import InputError
from penstock.model.batchnorm import DeferredNorms
from penstock.model.labels import Labels, Memory, Scored
from penstock.model.loss import Loss, Total, total_of
from penstock.model.stage import Stage
from penstock.training.sharded_state import DividedSum, Shard, ShardedState

Sums = dict[nn.Parameter, Tensor]


class StartedSums(NamedTuple):
    """Sums of a stage's gradients under way: those of which each replica gets its rows alone, and all others."""

    divided: list[DividedSum]
    whole: list[nn.Parameter]
    pending: Pending


@dataclass
class ReplicaSums:
    """Adds the gradients of the stages that have replicas. `stages`: those of this process, by stage and replica;
    `counts`: the replicas of every stage; `tied`: the weights that several stages use, which every replica needs
    whole; `reducers`: where the others are in other processes."""

    stages: Mapping[tuple[int, int], Stage]
    counts: Sequence[int]
    tied: Set[nn.Parameter]
    reducers: Mapping[int, Reducer] = field(default_factory=dict)
    sharded: ShardedState | None = None
    started: dict[int, StartedSums] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)  # by stage, when the sums were there, in nanoseconds

    def start(self, stage: Stage) -> None:
        """Begin to add the gradients of a stage; a replica in this process is waited for at the end."""
        reducer = self.reducers.get(stage.index)
        if reducer is None:
            return
        gradients = dict(zip(trained(stage), filled(stage, stage.parts), strict=True))
        made, divided = counts_of(stage, stage.parts), list[DividedSum]()
        if self.sharded is not None and self.sharded.level is not Shard.OPTIMIZER:
            own = [p for p in gradients if p in self.sharded.shards and p not in self.tied]
            divided = self.sharded.reduce({parameter: gradients.pop(parameter) for parameter in own})
        pending = reducer.start([*gradients.values(), made])
        self.started[stage.index] = StartedSums(divided, list(gradients), pending)

    def finish(self) -> Sums:
        """Return the sums, on every replica; where gradients are sharded, this replica's rows of them. Those of tied
        weights go on as the first replica's part."""
        sums: Sums = {}
        for (at, replica), stage in self.stages.items():
            if self.counts[at] == 1 or (replica and at not in self.reducers):
                continue
            for parameter, total in (self._received(at, stage) if at in self.reducers else self._added(at)).items():
                if parameter in self.tied:
                    stage.parts[parameter] = total
                else:
                    sums[parameter] = total
        return sums

    def forget(self) -> None:
        """Forget what an interrupted run has left behind."""
        self.started.clear()

    def _received(self, at: int, stage: Stage) -> Sums:
        """Return the sums of a stage whose other replicas are in other processes."""
        started = self.started.pop(at)
        *totals, counts = started.pending.wait()
        self.ended[at] = max(pending.ended for pending in (started.pending, *(one.pending for one in started.divided)))
        stage.parts.clear()
        made = dict(zip(trained(stage), counts.tolist(), strict=True))
        sums = dict(zip(started.whole, totals, strict=True))
        if self.sharded is not None:
            whole = self.sharded.whole
            sums |= self.sharded.reduced(started.divided)
            return {one: total for one, total in sums.items() if made[whole.get(one, one)]}
        return {parameter: total for parameter, total in sums.items() if made[parameter]}

    def _added(self, at: int) -> Sums:
        """Return the sums of a stage whose replicas are all in this process."""
        replicas = [self.stages[at, replica] for replica in range(self.counts[at])]
        every = [[*filled(one, one.parts), counts_of(one, one.parts)] for one in replicas]
        *totals, counts = (in_order(parts) for parts in zip(*every, strict=True))
        for one in replicas:
            one.parts.clear()
        self.ended[at] = perf_counter_ns()
        parameters = zip(trained(replicas[0]), totals, counts.tolist(), strict=True)
        return {parameter: total for parameter, total, made in parameters if made}


def trained(stage: Stage) -> list[nn.Parameter]:
    """Return the parameters of a stage that have gradients, in one order on all replicas."""
    return [parameter for parameter in stage.parameters if parameter.requires_grad]


def filled(stage: Stage, parts: Mapping[nn.Parameter, Tensor]) -> list[Tensor]:
    """Return the gradients of a stage's parameters; zeros where a replica has made none."""
    gradients = []
    for parameter in trained(stage):
        part = parts.get(parameter)
        if part is not None and part.layout is not torch.strided:
            raise InputError(
                "dense gradients in a stage with replicas, which are added to each other",
                f"a sparse one of shape {tuple(parameter.shape)}",
                "make the embedding with sparse=False, or give its stage one replica",
            )
        gradients.append(torch.zeros_like(parameter) if part is None else part)
    return gradients


def counts_of(stage: Stage, parts: Mapping[nn.Parameter, Tensor]) -> Tensor:
    """Return which gradients this replica has made: a parameter without any in all replicas gets none."""
    parameters = trained(stage)
    device = parameters[0].device if parameters else None
    return torch.tensor([float(p in parts) for p in parameters], dtype=torch.float32, device=device)


@dataclass
class MiniBatchEnd:
    """The exchange between the ranks of a pipeline with replicas when all rows before the updates have run."""

    world: World | Alone
    executors: Mapping[tuple[int, int], StageExecutor]  # by stage and replica, those of this process
    norms: DeferredNorms
    last: int  # the stage that has the losses

    def exchange(self, step: int, labels: Sequence[Labels], memory: Memory) -> Total:
        """Return the loss of the mini-batch. Every rank has to call."""
        here = {replica: executor for (stage, replica), executor in self.executors.items() if stage == self.last}
        stages = {stage for stage, _ in self.executors}
        facts = {
            "losses": {replica: _packed(executor.ordered_results) for replica, executor in here.items()},
            "scored": [scores(one) for one in labels if one.scored],
            "unit": memory.unit,
            "norms": self.norms.statistics(step),
        }
        every = [json.loads(part) for part in self.world.gather(json.dumps(facts).encode())]
        losses = {int(replica): part for one in every for replica, part in one["losses"].items()}
        units = {one["unit"] for one in every if one["unit"]}
        if len(units) > 1:
            raise InputError(
                "labels of as many positions a row on every replica of the last stage",
                "other numbers on some",
                "return (sum, weight) from the loss, or give the last stage one replica",
            )
        for one in every:
            self.norms.take_in(step, one["norms"], stages)
        for parts in (parts for one in every for parts in one["scored"]) if self.world.size > 1 else ():
            for one in labels:
                note(one, parts)
        total = Total(0.0, 0.0)
        for replica in sorted(losses):
            total = Total(total.total + losses[replica][0], total.weight + losses[replica][1])
        return total


def _packed(results: list[Any]) -> tuple[float, float]:
    losses: list[Loss] = results
    return tuple(total_of(losses)) if losses else (0.0, 0.0)  # type: ignore[return-value]


def scores(labels: Labels) -> dict[int, dict[int, Any]]:
    """Return how parts were scored here, in plain values."""
    return {
        stage: {part: asdict(scored) | {"calls": [(float(weight), total) for weight, total in scored.calls]}
                for part, scored in parts.items()}
        for stage, parts in labels.scored.items()
    }  # fmt: skip


def note(labels: Labels, scores: dict[str, dict[str, Any]]) -> None:
    """Take in how parts were scored on another rank: when all are known they must fit together."""
    for stage, parts in scores.items():
        for part, scored in parts.items():
            known = labels.scored.get(int(stage), {})
            if int(part) not in known:
                calls = tuple((weight, total) for weight, total in scored["calls"])
                labels.note(int(stage), int(part), Scored(**(scored | {"calls": calls})))
