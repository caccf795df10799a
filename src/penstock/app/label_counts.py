"""Values by which a loss may weigh its rows, counted in every batch: ignored labels, zeros of a mask, padding.

Where micro-batches have unequal counts of one, somebody has to find out whether the loss goes by it: see loss_checks.
That is done once for each tensor and kind of value; then it is known, or counted on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.model import tree
from penstock.model.naming import places

PADS = 8  # values that end rows to ask about, of one tensor: in random data many do
ATTEMPTS = 3
WINDOW = 3  # rows to look at a loss with

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Suspect:
    """A value of a tensor of the batch."""

    at: int  # in the order of `tree.tensors`
    place: str
    value: float

    def __str__(self) -> str:
        _, which, *path = self.place.split("/")
        whole = "the target" if which == "1" else "the inputs"
        return f"{self.value:g} in {whole}" + (f"' {'/'.join(path)}" if path else "")


@dataclass(frozen=True)
class Uneven:
    """Its counts in micro-batches, where they do not go by the rows; and how much else there is in each row."""

    suspect: Suspect
    counts: tuple[int, ...]
    kept: tuple[int, ...]
    others: frozenset[float]  # values that may mean the same: to change one into this would tell nothing

    @property
    def window(self) -> tuple[int, int]:
        """A few rows in which there is most."""
        starts = range(max(len(self.kept) - WINDOW, 0) + 1)
        return self._best([(first, min(first + WINDOW, len(self.kept))) for first in starts])[1]

    def micro_batch(self, cut: Spans) -> int | None:
        """That in which there is most; None where none has two rows with something."""
        least, best = self._best(cut)
        return list(cut).index(best) if least else None

    def _best(self, spans: Spans) -> tuple[int, tuple[int, int]]:
        """By the second row in which there is most."""
        return max(((sorted(self.kept[first:last])[-2:-1] or [0])[0], (first, last)) for first, last in spans)


class LabelCounts:
    """What is known of a pipeline's batches: which values its loss goes by, and which it does not."""

    def __init__(self) -> None:
        self.weighs: dict[Suspect, bool] = {}
        self.asked: Counter[Suspect] = Counter()

    def learn(self, suspect: Suspect, weighs: bool | None) -> None:
        """What has been found out; what is not after some batches never will be."""
        self.asked[suspect] += 1
        if weighs is not None or self.asked[suspect] == ATTEMPTS:
            self.weighs[suspect] = bool(weighs)

    def uneven(self, batch: Any, cut: Spans) -> list[Uneven]:
        """Values with unequal counts, but for those that the loss is known not to go by."""
        named = zip(places(batch), tree.tensors(batch), strict=True)
        found = []
        for at, (place, tensor) in enumerate(named):
            values = list(self._values(at, place, tensor)) if _may_be_labels(tensor) else []
            for value in values:
                suspect = Suspect(at, place, value)
                if self.weighs.get(suspect, True):
                    found += _uneven(suspect, tensor, cut, frozenset(values) - {value, 0.0})
        return found

    def _values(self, at: int, place: str, tensor: torch.Tensor) -> Iterator[float]:
        """Values of a tensor that may mean: do not count this."""
        zero = Suspect(at, place, 0.0)
        if tensor.dtype == torch.bool or tensor.is_floating_point():
            if self.weighs.get(zero, True):
                yield 0.0
            return
        low = float(tensor.min())
        if low < 0:
            yield low
        if low <= 0 and self.weighs.get(zero, True):
            yield 0.0
        yield from self._pads(at, place, tensor)

    def _pads(self, at: int, place: str, tensor: torch.Tensor) -> Iterator[float]:
        if tensor.dim() != 2 or tensor.shape[1] < 2:
            return
        known = {one.value for one in self.weighs if (one.at, one.place) == (at, place)}
        ends = set(tensor[:, -1][tensor[:, -1] == tensor[:, -2]].tolist()) - {0}
        yield from sorted(value for value in ends if value > 0 and (value in known or len(known) < PADS))


def _may_be_labels(tensor: torch.Tensor) -> bool:
    """Whole numbers, and masks; not images or features, which are full of zeros that mean nothing."""
    if not tensor.dim() or not tensor.numel() or tensor.is_meta or tensor.is_complex():
        return False
    return tensor.dim() <= 2 or not tensor.is_floating_point()


def _uneven(suspect: Suspect, tensor: torch.Tensor, cut: Spans, others: frozenset[float]) -> list[Uneven]:
    met = tensor == suspect.value
    by_row = met.reshape(len(tensor), -1).sum(1).tolist() if tensor.dim() > 1 else met.int().tolist()
    counts = tuple(sum(by_row[first:last]) for first, last in cut)
    rows, total = cut[-1][1] - cut[0][0], sum(counts)
    if all(count * rows == total * (last - first) for count, (first, last) in zip(counts, cut, strict=True)):
        return []
    kept = _ordinary(tensor, suspect.value, others).reshape(len(tensor), -1).sum(1).tolist()
    return [Uneven(suspect, counts, tuple(kept), others)]


def _ordinary(tensor: torch.Tensor, value: float, others: frozenset[float]) -> torch.Tensor:
    """Where a tensor has neither a value nor another that may mean the same."""
    found = tensor != value
    for other in others:
        found &= tensor != other
    return found


def variants(batch: Any, uneven: Uneven) -> list[Any] | None:
    """A batch of a few rows as it is; with more of a value in one row; in another; and in both. None where the rows
    have too little else."""
    suspect, tensor = uneven.suspect, tree.tensors(batch)[uneven.suspect.at]
    ordinary = _ordinary(tensor, suspect.value, uneven.others).reshape(len(tensor), -1)
    kept = ordinary.sum(1).tolist()
    first, second = sorted(range(len(kept)), key=lambda row: (-kept[row], row))[:2]
    if not kept[second]:
        return None

    def changed(*rows: int) -> Any:
        fresh = tensor.clone(memory_format=torch.contiguous_format)
        for row in rows:
            places = ordinary[row].nonzero().flatten()
            fresh[row : row + 1].view(-1)[places[len(places) // 2 :]] = suspect.value
        numbers = iter(range(len(tree.tensors(batch))))
        return tree.replace(batch, lambda t: fresh if next(numbers) == suspect.at else t)

    return [batch, changed(first), changed(second), changed(first, second)]
