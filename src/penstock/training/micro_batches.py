"""Cut a batch into micro-batches, each with its path through the model and a function that finishes its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import torch
from torch import nn

from penstock.engine.replica_rows import part_of
from penstock.errors import InputError
from penstock.model.batch import as_call, piece, require_device, rows_of, spans
from penstock.model.labels import Labels, Memory
from penstock.model.loss import Loss, read_loss
from penstock.model.mean_loss import weight_of
from penstock.model.passage import Common, Passage
from penstock.model.path import Path
from penstock.model.seeding import mixed
from penstock.model.split import Split
from penstock.model.stage import Job, Settings, Share
from penstock.training.batches import Feed, taken_by

Cut = int | list[tuple[int, int]]  # how many micro-batches, empty where rows are too few, or the rows of each
Finish = Callable[[Any, Any, int], Any]  # of the model's result, the target and the rows
Place = tuple[int, int]  # the replicas of a stage, and the number of one


class MicroBatches:
    """Makes the jobs of a batch, for the engine to run."""

    def __init__(self, split: Split, feed: Feed, settings: Settings) -> None:
        self.split, self.feed = split, feed
        self.device, self.seed = settings.device, settings.seed
        # Values computed to find a path serve the stages too, unless they compute in another precision.
        self.shares = settings.autocast is nullcontext
        self.trained = self._trained()
        self.memory = Memory()  # how the loss weighs

    def by_replica(
        self,
        inputs: Any,
        target: Any,
        parts: int,
        finish: Finish,
        step: int,
        places: Sequence[Place],
        alike: bool,
        first_number: int = 0,
    ) -> list[list[Job]]:
        """Return the jobs of each of some replicas, given as (replicas of its stage, its number). With `alike`, as many
        for all stages, each draws random numbers of its own between the model's modules."""
        call = as_call(inputs)
        rows = rows_of(call, target)
        cut = spans(rows, min(parts, rows))
        missing = [(rows, rows)] * (parts - len(cut))
        divided = {replicas: divided_spans([*cut, *missing], replicas) for replicas, _ in places}
        labels = {count: Labels((call, target), every, self.memory, weight_of) for count, every in divided.items()}

        def own(count: int, replica: int) -> list[Job]:
            cut, drawing = divided[count][replica::count], replica if alike else 0
            return self.jobs(inputs, target, cut, finish, step, first_number, labels[count], drawing)

        sizes = [last - first for first, last in cut]
        return [self._of_replica(own(count, replica), sizes, (count, replica)) for count, replica in places]

    def _of_replica(self, jobs: list[Job], rows: list[int], place: Place) -> list[Job]:
        """Say in the jobs of one replica which part of each micro-batch they are."""
        for number, job in enumerate(jobs):
            job.share = Share(place[1], place[0], rows[number] if number < len(rows) else 0)
            job.last = number == len(rows) - 1
        return jobs

    def jobs(
        self,
        inputs: Any,
        target: Any,
        cut: Cut,
        finish: Finish,
        step: int,
        first_number: int = 0,
        labels: Labels | None = None,
        drawing: int = 0,
    ) -> list[Job]:
        """Return the micro-batches of a batch. One without rows has nothing to be done. `drawing`: the replica that
        draws random numbers."""
        call = as_call(inputs)
        self._notice_frozen()
        require_device((call, target), self.device)
        stamp, every = self.feed.stamp(inputs, target), rows_of(call, target)
        parts = cut if isinstance(cut, int) else len(cut)
        cut = spans(every, min(cut, every)) if isinstance(cut, int) else cut
        if labels is None and isinstance(finish, scored):
            labels = Labels((call, target), cut, self.memory, weight_of)
        jobs: list[Job] = []
        path_of = self._paths(call)
        for number in range(parts):
            first, last = cut[number] if number < len(cut) else (0, 0)
            rows, chance = last - first, mixed(self.seed, step, number, *((drawing,) if drawing else ()))
            if not rows:  # the schedule has places for them
                path = jobs[0].path if jobs else self.split.first
                job = Job(first_number + number, step, (), {}, 0, path, _no_result)
            else:
                args, kwargs = piece(call, first, last, every)
                passage = Passage()
                with taken_by(self.split.model, args, kwargs):
                    path = path_of(args, kwargs, rows, chance, passage)
                ending = _Finish(finish, piece(target, first, last, every), rows)
                job = Job(first_number + number, step, args, kwargs, rows, path, ending, passage=passage, chance=chance)
                job.labels = labels
            job.last, job.part, job.stamp, job.mates = number == len(cut) - 1, number, stamp, jobs
            jobs.append(job)
        return jobs

    def _paths(
        self, call: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> Callable[[tuple[Any, ...], dict[str, Any], int, int, Passage], Path]:
        """Return a function that finds the path of a micro-batch.

        Where the inputs are tensors and no code decides by their values, micro-batches of as many rows share a path and
        all values that are computed from no tensor.
        """
        outlook, by_rows = self.split.outlook(), dict[int, tuple[Path, Common]]()
        plain = all(type(value) is torch.Tensor for value in (*call[0], *call[1].values()))

        def path_of(args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, chance: int, passage: Passage) -> Path:
            if rows in by_rows:
                path, passage.fixed = by_rows[rows]
                return path
            path = self.split.path(args, kwargs, outlook, chance, passage if self.shares else None)
            if plain and not path.trace.decides:
                by_rows[rows] = path, passage.fixed
            return path

        return path_of

    def _trained(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the parameters, a tied one as often as modules hold it, and which require grad.

        Read from the modules themselves: `parameters()` takes several times as long, and this is done every step.
        """
        modules, visited, held = [self.split.model], set[int](), []
        while modules:
            module = modules.pop()
            if id(module) not in visited:
                visited.add(id(module))
                modules += [inner for inner in module._modules.values() if inner is not None]
                held += [parameter for parameter in module._parameters.values() if parameter is not None]
        return held, [parameter.requires_grad for parameter in held]

    def _notice_frozen(self) -> None:
        """Forget the traces when other parameters require a gradient, as other values then do too."""
        parameters, trained = self._trained()
        before, trained_before = self.trained
        if len(parameters) != len(before) or not all(map(is_, parameters, before)):
            self._refuse_other_parameters(set(parameters), set(before))
        elif trained == trained_before:
            return
        self.split.paths.clear()
        self.trained = parameters, trained

    def _refuse_other_parameters(self, now: set[nn.Parameter], before: set[nn.Parameter]) -> None:
        """Raise for parameters that have changed: new ones would belong to no stage and not be trained."""
        if now == before:
            return
        fresh = [name for name, parameter in self.split.model.named_parameters() if parameter not in before]
        gone = len(before - now)
        raise InputError(
            "the parameters that the model had when its Pipeline was made",
            f"{len(fresh)} others ({', '.join(fresh[:3])}{' ...' if fresh[3:] else ''})" if fresh else f"{gone} fewer",
            "change the model first and make the Pipeline then, or change values in place (load_state_dict without "
            "assign=True)",
        )


def divided_spans(cut: Sequence[tuple[int, int]], replicas: int) -> list[tuple[int, int]]:
    """Return the rows of every replica's part of every micro-batch, in their order; some may be empty."""
    parts = []
    for first, last in cut:
        for replica in range(replicas):
            begin, end = part_of(last - first, replicas, replica)
            parts.append((first + begin, first + end))
    return parts


@dataclass(frozen=True)
class _Finish:
    """Finishes the model's result for one micro-batch, with its target."""

    finish: Finish
    target: Any
    rows: int

    def __call__(self, result: Any) -> Any:
        return self.finish(result, self.target, self.rows)

    def of(self, target: Any) -> _Finish:
        """Return the same for another target."""
        return replace(self, target=target)


def _no_result(result: Any) -> Any:
    """Fail: no stage runs a micro-batch without rows."""
    raise AssertionError("a micro-batch without rows was run")


def called(loss: Callable[[Any, Any], Any], result: Any, target: Any) -> Any:
    """Call the user's loss; raise one clear error if it needs a target and gets None."""
    try:
        return loss(result, target)
    except Exception as error:
        if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            do = "write loss(result, target): without a target in the batch, None comes in its place"
            raise InputError("a loss that takes two arguments, result and target", error, do) from None
        if target is not None or "NoneType" not in str(error):
            raise
        raise InputError(
            "a target that the loss takes",
            f"None, which it answers with {type(error).__name__}: {error}",
            "give one, pipe.step(inputs, target) or a loader of (inputs, target); a loss may also go by result alone",
        ) from error


@dataclass(frozen=True)
class scored:
    """Finishes a result by the user's loss."""

    loss: Callable[[Any, Any], Any]

    def __call__(self, result: Any, target: Any, rows: int) -> Loss:
        return read_loss(called(self.loss, result, target), rows)


class kept_and_scored(scored):
    """Finishes a result as itself and its loss, which is None where a step would refuse it."""

    def __call__(self, result: Any, target: Any, rows: int) -> Any:
        try:
            return result, super().__call__(result, target, rows)
        except Exception:
            return result, None


def both(pairs: list[Any]) -> tuple[list[Any], list[Loss] | None]:
    """Return results and losses apart; None for the losses if one is missing."""
    losses = [loss for _, loss in pairs]
    return [result for result, _ in pairs], None if None in losses else losses


def unchanged(result: Any, target: Any, rows: int) -> Any:
    """Return the result itself."""
    return result
