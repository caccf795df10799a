"""Updates of synchronous training: what is agreed between all stages before any of them steps.

What `.grad` held before a step is set aside: it is not divided, and is restored if the step fails. When all backwards
are done the step's gradients are divided by their weight, clipped by the norm of all and checked together; then the
UPDATE rows of the schedule step the optimizers, stage by stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.comm.world.world import Alone, World
from penstock.engine.observer import Observers
from penstock.engine.weights.ties import TiedWeights
from penstock.errors import InputError
from penstock.model.loss import Total
from penstock.model.stage import Job, Stage
from penstock.training.finite_gradients import Fault, Gradients, refusal, values_of
from penstock.training.replicas import ReplicaSums
from penstock.training.stage_optimizers import Optimizers, require_scale


class Update(NamedTuple):
    """The outcome of a step's gradients."""

    updated: bool
    norm: float | None = None  # of all gradients together, before clipping; None where nobody asked


class FlushUpdates:
    """Agrees on the gradients of a mini-batch, and updates stage by stage where the schedule says so."""

    def __init__(
        self,
        optimizers: Optimizers,
        stages: dict[int, Stage],
        ties: TiedWeights,
        world: World | Alone,
        observers: Observers,
        sums: ReplicaSums | None = None,
    ) -> None:
        self.optimizers, self.stages, self.ties, self.world = optimizers, stages, ties, world
        self.observers, self.sums = observers, sums
        self.sharded = None if sums is None else sums.sharded
        self.fresh: Gradients = {}  # of this step
        self.ready: Gradients = {}  # agreed upon, for the update rows
        self.usable = False  # whether the update rows shall step
        self.mean = 0.0
        self.left: set[int] = set()  # stages whose update is still to come

    def before_forward(self, stage: Stage, job: Job, version: int) -> None:
        """Nothing of an update is left to be done."""

    def after_forward(self, stage: Stage, job: Job, result: Any) -> None:
        """Losses are added when all forwards are done."""

    def before_backward(self, stage: Stage, job: Job) -> None:
        """Gradients of all micro-batches are added in `.grad`."""

    def after_backward(self, stage: Stage, job: Job) -> None:
        """The update comes when all stages have their gradients."""

    def root(self, rows: int) -> float:
        """Return what a loss's gradient starts from: about that of the mean, lest a sum over many rows overflow in
        fp16."""
        optimizers = self.optimizers
        if optimizers.steps == 0:
            optimizers.unit = float(rows)
        return optimizers.scale / optimizers.unit

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Keep the gradients that are made inside apart: `.grad` is afterwards as before."""
        parameters = self.optimizers.parameters
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
            self.fresh = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
            added: Gradients = {}
            if self.sums is not None:
                added = self.sums.finish()
                for stage, end in self.sums.ended.items():
                    for notify in self.observers.reduced:
                        notify(stage, end)
            self.fresh, added, tied = map(self._own_rows, (self.fresh, added, self._tied()))
            for parameter, total in (*added.items(), *tied.items()):
                own = self.fresh.get(parameter)  # of a loss that reads the weight itself, to keep it small
                self.fresh[parameter] = total if own is None else total + own
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                _set_grad(parameter, gradient)

    def _own_rows(self, gradients: Gradients) -> Gradients:
        """Return this replica's shard of the gradients, where replicas divide them."""
        return gradients if self.sharded is None else self.sharded.sliced(gradients)

    def agree(self, loss: Total, step: int) -> Update:
        """Take in one step's gradients and, when enough have come, decide on the update. All ranks refuse what is not
        finite."""
        optimizers = self.optimizers
        self.usable = False
        if optimizers.accumulate > 1 and not optimizers.fp16 and optimizers.make is not None:
            fresh, self.fresh = self.fresh, {}
            self._require_finite(fresh, step)  # before it gets among the sums of other steps
            self.fresh = fresh
        for parameter, gradient in self.fresh.items():
            total = optimizers.sums.get(parameter)
            optimizers.sums[parameter] = gradient if total is None else total.add_(gradient)
        self.fresh = {}
        optimizers.weight += loss.weight
        optimizers.steps += 1
        if optimizers.steps < optimizers.accumulate:
            return Update(False)
        gradients = self._averaged()
        norm = self._clipped(gradients)
        usable = self._usable(gradients, norm, step)
        if optimizers.make is None:
            for parameter, gradient in gradients.items() if usable else ():
                _set_grad(parameter, gradient)
            return Update(False, norm)
        self.usable, self.mean = usable, loss.mean
        self.ready, self.left = gradients if usable else {}, set(optimizers.owned)
        for parameter in optimizers.parameters:
            parameter.grad = None
        if self.sharded is not None:
            self.sharded.clear_own_gradients()
        return Update(usable, norm)

    def reduce(self, stage: Stage, version: int) -> None:
        """Begin to add the gradients of a stage's replicas."""
        if self.sums is None:
            raise InputError(
                "no row that adds gradients where no stage is replicated",
                f"the row {stage.index} REDUCE",
                "leave it out",
            )
        self.sums.start(stage)

    def update(self, stage: Stage, version: int) -> None:
        """Step a stage's optimizer by the gradients that were agreed upon; nothing while steps are accumulated.
        Replicas in one process have the same weights, which the first of them steps."""
        at = stage.index
        if not self.usable or at not in self.left:
            return
        self.optimizers.updating = at
        self.optimizers.fetch(at)
        for notify in self.observers.update_begins:
            notify(at)
        self.optimizers.step(at, self.ready)
        if self.sharded is not None and at in self.sharded.owned:
            self.sharded.gather(at)
        for notify in self.observers.update_ends:
            notify(at)
        self.left.discard(at)
        for group in self.ties.groups:
            if group.owner == at:
                self.ties.send_weights(group, copied=False)  # the next update waits for gradients made with these
        if not self.left:
            self._finish()

    def spread_weights(self) -> None:
        """Give the owners' weights to the processes that have copies of them."""
        for group in self.ties.groups:
            if group.owner in self.stages:
                self.ties.send_weights(group, copied=False)
        self._receive_copies()

    def forget(self) -> None:
        """Forget what an interrupted step has left behind."""
        self.fresh, self.ready, self.usable = {}, {}, False
        self.ties.forget()
        if self.sums is not None:
            self.sums.forget()

    def _finish(self) -> None:
        self._receive_copies()
        for stage in self.optimizers.owned:
            self.optimizers.advance(stage, self.mean)
        self.ready, self.usable, self.optimizers.updating = {}, False, None

    def _receive_copies(self) -> None:
        with torch.no_grad():
            for group, user in self.ties.owned_elsewhere():
                for parameter, weight in zip(group.parameters, self.ties.receive_weights(group, user), strict=True):
                    parameter.copy_(weight)

    def _tied(self) -> Gradients:
        """Return the gradients of tied weights that stages here own, added over all stages."""
        for stage in self.stages.values():
            self.ties.send_gradients(stage, 0)
        total: Gradients = {}
        for stage in self.stages.values():
            total |= self.ties.collect_gradients(stage, 0)
        for stage in self.stages.values():
            stage.parts.clear()
        return total

    def _averaged(self) -> Gradients:
        """Return the sums divided by their weight, with what `.grad` holds added."""
        optimizers = self.optimizers
        if self.sharded is not None:
            self.sharded.take_own_gradients()
        gradients, weight = optimizers.sums, optimizers.weight * optimizers.scale / optimizers.unit
        optimizers.sums, optimizers.weight, optimizers.steps = {}, 0.0, 0
        if gradients and weight != 1:
            torch._foreach_div_(list(gradients.values()), weight)
        for parameter in optimizers.parameters:
            if parameter.grad is not None:
                total = gradients.get(parameter)
                before = parameter.grad
                gradients[parameter] = before if total is None else total.add_(before.to(total.device))
        return gradients

    def _clipped(self, gradients: Gradients) -> float | None:
        """Clip by the global norm, as torch does, and return it; None where nobody asks."""
        clip = self.optimizers.clip
        if clip is None and not self.optimizers.fp16:
            return None
        values = [values_of(gradients, parameter) for parameter in gradients]
        norm = self._total_norm([self._norm_name(parameter) for parameter in gradients], values)
        if clip is not None and values and isfinite(norm):
            torch._foreach_mul_(values, min(1.0, clip / (norm + 1e-6)))
        return norm

    def _norm_name(self, parameter: nn.Parameter) -> str:
        """Return the name that a gradient's norm is counted under: once for all replicas, once for each shard."""
        name = self.optimizers.names[parameter]
        sharded = self.sharded is not None and parameter in self.sharded.whole
        return f"{name} {self.sharded.replica}" if sharded and self.sharded is not None else name

    def _total_norm(self, names: list[str], values: list[torch.Tensor]) -> float:
        """Return the norm over all ranks: each tensor's by its name, added in one order, so that all have the same
        bits."""
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(values)]).tolist() if values else []
        parts = self.world.gather(json.dumps(dict(zip(names, norms, strict=True))).encode())
        by_name = {name: norm for part in parts for name, norm in json.loads(part).items()}
        ordered = torch.tensor([by_name[name] for name in sorted(by_name)], dtype=torch.float64)
        return float(torch.linalg.vector_norm(ordered))

    def _usable(self, gradients: Gradients, norm: float | None, step: int) -> bool:
        """Return whether the gradients of all stages are finite; under fp16 the scale adapts to the answer, and else
        they have to be."""
        optimizers = self.optimizers
        if norm is not None and not isfinite(norm):
            if not optimizers.fp16:
                raise self._refusal(optimizers.fault(gradients), step, norm)
            require_scale(optimizers.scale, step)
            optimizers.shrink()
            return False
        if optimizers.make is not None:
            self._require_finite({} if norm is not None else gradients, step)
        optimizers.grow()
        return True

    def _require_finite(self, gradients: Gradients, step: int) -> None:
        """Refuse, on all ranks, before anything of an update is applied on any."""
        fault = self.optimizers.fault(gradients)
        if not self.world.all_well(not fault):
            raise self._refusal(fault, step)

    def _refusal(self, fault: Fault, step: int, norm: float | None = None) -> InputError:
        """Return the same error on all ranks: every one of them has to call."""
        return refusal([json.loads(part) for part in self.world.gather(json.dumps(fault).encode())], step, norm)


def _set_grad(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Set `.grad`; weights that wait in host memory have theirs there."""
    parameter.grad = None if gradient is None else gradient.to(parameter.device)
