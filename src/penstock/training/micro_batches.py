"""A batch as micro-batches: rows, the path each takes through the model, and what becomes of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from penstock.engine.replica_rows import part_of
from penstock.errors import InputError
from penstock.model.batch import as_call, piece, require_device, rows_of, spans
from penstock.model.labels import Labels, Memory
from penstock.model.loss import Loss, read_loss
from penstock.model.mean_loss import weight_of
from penstock.model.path import Path
from penstock.model.seeding import mixed
from penstock.model.split import Split
from penstock.model.stage import Job, Share
from penstock.training.batches import Feed, taken_by

Cut = int | list[tuple[int, int]]  # how many micro-batches, empty where rows are too few, or the rows of each
Finish = Callable[[Any, Any, int], Any]  # of the model's result, the target and the rows
Place = tuple[int, int]  # the replicas of a stage, and the number of one


class MicroBatches:
    """Makes the jobs of a batch, for the engine to run."""

    def __init__(self, split: Split, feed: Feed, device: torch.device, seed: int) -> None:
        self.split, self.feed, self.device, self.seed = split, feed, device, seed
        self.trained = self._trained()
        self.memory = Memory()  # of how the loss weighs

    def by_replica(
        self, inputs: Any, target: Any, parts: int, finish: Finish, step: int, places: Sequence[Place], alike: bool
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
            drawing = replica if alike else 0
            return self.jobs(
                inputs, target, divided[count][replica::count], finish, step, labels=labels[count], drawing=drawing
            )

        whole = [last - first for first, last in cut]
        return [self._of_replica(own(count, replica), whole, (count, replica)) for count, replica in places]

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
                with taken_by(self.split.model, args, kwargs):
                    path = path_of(args, kwargs, rows, chance)
                ending = _Finish(finish, piece(target, first, last, every), rows)
                job = Job(first_number + number, step, args, kwargs, rows, path, ending, chance=chance, labels=labels)
            job.last, job.part, job.stamp, job.mates = number == len(cut) - 1, number, stamp, jobs
            jobs.append(job)
        return jobs

    def _paths(
        self, call: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> Callable[[tuple[Any, ...], dict[str, Any], int, int], Path]:
        """How to find the path of one of a batch's micro-batches. Where they are tensors and nobody looks at the data,
        those of as many rows take the same one."""
        outlook, known = self.split.outlook(), dict[int, Path]()
        plain = all(type(value) is torch.Tensor for value in (*call[0], *call[1].values()))

        def path_of(args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, chance: int) -> Path:
            found = known.get(rows)
            if found is None:
                found = self.split.path(args, kwargs, outlook, chance)
                if plain and not found.trace.decides:
                    known[rows] = found
            return found

        return path_of

    def _trained(self) -> dict[nn.Parameter, bool]:
        return {parameter: parameter.requires_grad for parameter in self.split.model.parameters()}

    def _notice_frozen(self) -> None:
        """Which values need a gradient depends on which parameters do: trace again when that has changed."""
        trained = self._trained()
        if trained.keys() != self.trained.keys():
            self._refuse_other_parameters(trained)
        if trained != self.trained:
            self.split.paths.clear()
            self.trained = trained

    def _refuse_other_parameters(self, found: dict[nn.Parameter, bool]) -> None:
        """Those that came since would be in the forward and in no stage, and nobody would train them."""
        fresh = [name for name, parameter in self.split.model.named_parameters() if parameter not in self.trained]
        gone = len(self.trained.keys() - found.keys())
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
    """What becomes of the model's result for one micro-batch."""

    finish: Finish
    target: Any
    rows: int

    def __call__(self, result: Any) -> Any:
        return self.finish(result, self.target, self.rows)

    def of(self, target: Any) -> _Finish:
        """The same for another target."""
        return replace(self, target=target)


def _no_result(result: Any) -> Any:
    """Nothing becomes of a micro-batch without rows: no stage runs it."""
    raise AssertionError("a micro-batch without rows was run")


def called(loss: Callable[[Any, Any], Any], result: Any, target: Any) -> Any:
    """What a loss of the user's says; one that finds None where it wants a target is told of as that."""
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
    """A loss of the user's, as what becomes of a result."""

    loss: Callable[[Any, Any], Any]

    def __call__(self, result: Any, target: Any, rows: int) -> Loss:
        return read_loss(called(self.loss, result, target), rows)


class kept_and_scored(scored):
    """The result itself, and the loss; None for one that a step would refuse."""

    def __call__(self, result: Any, target: Any, rows: int) -> Any:
        try:
            return result, super().__call__(result, target, rows)
        except Exception:
            return result, None


def both(found: list[Any]) -> tuple[list[Any], list[Loss] | None]:
    """Results and losses; None for losses of which one is missing."""
    losses = [loss for _, loss in found]
    return [result for result, _ in found], None if None in losses else losses


def unchanged(result: Any, target: Any, rows: int) -> Any:
    """The result itself."""
    return result
