"""Values by which a loss may weigh its rows, counted in every batch: ignored labels, zeros of a mask, padding, and what
stands for "nothing" elsewhere (NaN, or the largest value, as 255 in an image of classes).

Where micro-batches have unequal counts of one, somebody has to find out whether the loss goes by it: see
loss_checks.py. That is done once for each tensor and kind of value; then it is known, or counted on. A loss may also
go by values that nothing marks: lengths, weights of rows, a token in the middle of a vocabulary. So rows with the
values of another row are looked at, too, in the first batches in which rows differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import isnan, nan
from typing import Any

import torch

from penstock.model import tree
from penstock.model.naming import places

PADS = 8  # values that end rows, or are the largest, to ask about, of one tensor: in random data many do or are
ATTEMPTS = 3
SAMPLE = 512  # numbers of a tensor to look for repeated ones in
WINDOW = 3  # rows to look at a loss with

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Suspect:
    """A value of a tensor of the batch; or all its values."""

    at: int  # in the order of `tree.tensors`
    place: str
    value: float | None  # None: all

    def __str__(self) -> str:
        _, which, *path = self.place.split("/")
        whole = "the target" if which == "1" else "the inputs"
        what = "the values" if self.value is None else f"{self.value:g}"
        return f"{what} in {whole}" + (f"'{'s' if which == '1' else ''} {'/'.join(path)}" if path else "")


@dataclass(frozen=True)
class Uneven:
    """Its counts in micro-batches, where they do not go by the rows; and how much else there is in each row."""

    suspect: Suspect
    counts: tuple[int, ...]
    kept: tuple[int, ...]
    others: frozenset[float]  # values that may mean the same: to change one into this would tell nothing
    row: torch.Tensor | None = None  # whose values others are to get, where the suspect is all of them

    @property
    def window(self) -> tuple[int, int]:
        """A few rows in which there is most."""
        return _best(self.kept, _windows(len(self.kept)))[1]

    def micro_batch(self, cut: Spans) -> int | None:
        """That in which there is most; None where none has rows enough with something."""
        least, (first, last) = _best(self.kept, cut)
        return list(cut).index((first, last)) if least and (self.row is None or last - first >= WINDOW) else None


class LabelCounts:
    """What is known of a pipeline's batches: which values its loss goes by, and which it does not."""

    def __init__(self, layers: frozenset[str] = frozenset()) -> None:
        self.layers = layers  # places of inputs that layers of the last stage take: these may mix rows, as a loss may
        self.weighs: dict[Suspect, bool] = {}
        self.asked: Counter[Suspect] = Counter()

    def learn(self, suspect: Suspect, weighs: bool | None) -> None:
        """What has been found out; what is not after some batches never will be. Of all values together, one batch
        tells of those that it has more of in one row than in another."""
        self.asked[suspect] += 1
        settled = weighs or (weighs is not None and suspect.value is not None)
        if settled or self.asked[suspect] == ATTEMPTS:
            self.weighs[suspect] = bool(weighs)

    def uneven(self, batch: Any, cut: Spans) -> list[Uneven]:
        """Values with unequal counts, but for those that the loss is known not to go by. In an order that all ranks
        have, whose dicts may be in another."""
        found: list[Uneven] = []
        if len(cut) < 2:
            return found
        for place, at, tensor in sorted(zip(places(batch), count(), tree.tensors(batch), strict=False)):
            if not _may_be_labels(place, tensor):
                continue
            tensor = tensor.detach()
            pads = _pads(tensor)
            marks = list(dict.fromkeys(self._marks(at, place, tensor, pads)))
            left_out = [value for value in marks if not value > 0 or value in pads]
            for value in marks:
                suspect = Suspect(at, place, value)
                if self.weighs.get(suspect, True):
                    found += _uneven(suspect, tensor, cut, frozenset(left_out) - {value, 0.0})
            whole = Suspect(at, place, None)
            if _may_weigh(place, tensor) and place not in self.layers and self.weighs.get(whole, True):
                found += _unlike(whole, tensor, cut, left_out)
        return found

    def _marks(self, at: int, place: str, tensor: torch.Tensor, pads: list[float]) -> Iterator[float]:
        """Values of a tensor that may mean: do not count this."""
        low = 0.0 if tensor.dtype == torch.bool else float(tensor.min())
        if not low > 0 and self.weighs.get(Suspect(at, place, 0.0), True):
            yield 0.0
        if isnan(low):
            yield nan
            return
        if low < 0 and not tensor.is_floating_point():
            yield low
        if not tensor.is_floating_point() and not _may_weigh(place, tensor):
            return
        known = {one.value: found for one, found in self.weighs.items() if (one.at, one.place) == (at, place)}
        yield from (value for value, found in known.items() if found and value is not None and not isnan(value))
        if len(known) < PADS:
            yield from pads
            yield from _repeated(tensor) if tensor.is_floating_point() else _largest(tensor)


def _largest(tensor: torch.Tensor) -> list[float]:
    """The largest number, if it is there twice."""
    high = float(tensor.max())
    return [high] if high > 0 and bool((tensor == high).sum() > 1) else []


def _pads(tensor: torch.Tensor) -> list[float]:
    """Values that end rows twice."""
    if tensor.dim() != 2 or tensor.shape[1] < 2 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return []
    return sorted(value for value in set(tensor[:, -1][tensor[:, -1] == tensor[:, -2]].tolist()) if value > 0)


def _repeated(tensor: torch.Tensor) -> list[float]:
    """The most frequent number in a sample of a tensor, of those that occur more than once."""
    few = tensor.flatten()[:: max(tensor.numel() // SAMPLE, 1)]
    value = few.mode().values
    return [float(value)] if bool((few == value).sum() > 1) and bool(value.isfinite()) else []


def _may_be_labels(place: str, tensor: torch.Tensor) -> bool:
    """Whole numbers, masks, and targets; not images or features, which are full of zeros that mean nothing."""
    if not tensor.dim() or not tensor.numel() or tensor.is_meta or tensor.is_complex():
        return False
    return tensor.dim() <= 2 or not tensor.is_floating_point() or place.split("/")[1] == "1"


def _may_weigh(place: str, tensor: torch.Tensor) -> bool:
    """Numbers, but for the pixels of an input."""
    return tensor.dtype != torch.bool and (tensor.dim() <= 2 or place.split("/")[1] == "1")


def _is(tensor: torch.Tensor, value: float) -> torch.Tensor:
    return tensor.isnan() if isnan(value) else tensor == value


def _windows(rows: int) -> list[tuple[int, int]]:
    return [(first, min(first + WINDOW, rows)) for first in range(max(rows - WINDOW, 0) + 1)]


def _best(kept: Sequence[int], spans: Spans) -> tuple[int, tuple[int, int]]:
    """By the second row in which there is most."""
    return max(((sorted(kept[first:last])[-2:-1] or [0])[0], (first, last)) for first, last in spans)


def _uneven(suspect: Suspect, tensor: torch.Tensor, cut: Spans, others: frozenset[float]) -> list[Uneven]:
    assert suspect.value is not None
    met = _is(tensor, suspect.value)
    by_row = met.reshape(len(tensor), -1).sum(1).tolist() if tensor.dim() > 1 else met.int().tolist()
    counts = tuple(sum(by_row[first:last]) for first, last in cut)
    rows, total = cut[-1][1] - cut[0][0], sum(counts)
    if all(count * rows == total * (last - first) for count, (first, last) in zip(counts, cut, strict=True)):
        return []
    for same in (others, frozenset[float]()):  # of a mask, whatever is not the one is the other
        found = Uneven(suspect, counts, (), same)
        kept = _ordinary(tensor, found).reshape(len(tensor), -1).sum(1).tolist()
        if _best(kept, _windows(rows))[0]:
            break
    return [replace(found, kept=tuple(kept))]


def _unlike(suspect: Suspect, tensor: torch.Tensor, cut: Spans, marks: Sequence[float]) -> list[Uneven]:
    """All values of a tensor, where micro-batches have others; what marks that something is not counted stays."""
    rows = cut[-1][1] - cut[0][0]
    parts = [tensor[first:last].flatten().sort().values for first, last in cut]
    if rows < WINDOW or all(torch.equal(part, parts[0]) for part in parts[1:]):
        return []
    usual = torch.ones_like(tensor, dtype=torch.bool)
    for mark in marks:
        usual &= ~_is(tensor, mark)
    flat, usual = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None], usual.reshape(len(tensor), -1)
    sums = flat.double().where(usual, 0.0).sum(1)
    found = []
    for row in (int(sums.argmax()), int(sums.argmin())):
        kept = (usual & usual[row] & (flat != flat[row])).sum(1).tolist()
        found.append(Uneven(suspect, (), tuple(kept), frozenset(marks), tensor[row]))
    return [max(found, key=lambda one: _best(one.kept, _windows(rows))[0])]


def _ordinary(tensor: torch.Tensor, uneven: Uneven) -> torch.Tensor:
    """Where a tensor has neither the value nor another that may mean the same; or none that another row has not."""
    found = torch.ones_like(tensor, dtype=torch.bool)
    for value in uneven.others:
        found &= ~_is(tensor, value)
        if uneven.row is not None:
            found &= ~_is(uneven.row, value)
    if uneven.row is not None:
        return found & (tensor != uneven.row)
    assert uneven.suspect.value is not None
    return found & ~_is(tensor, uneven.suspect.value)


def variants(batch: Any, uneven: Uneven) -> list[Any] | None:
    """A batch of a few rows as it is; with more of a value, or another row's values, in one row; in another; and in
    both. None where the rows have too little else."""
    suspect, tensor = uneven.suspect, tree.tensors(batch)[uneven.suspect.at]
    ordinary = _ordinary(tensor, uneven).reshape(len(tensor), -1)
    kept = ordinary.sum(1).tolist()
    first, second = sorted(range(len(kept)), key=lambda row: (-kept[row], row))[:2]
    if not kept[second]:
        return None

    def changed(*rows: int) -> Any:
        fresh = tensor.clone(memory_format=torch.contiguous_format)
        for row in rows:
            places, cells = ordinary[row].nonzero().flatten(), fresh[row : row + 1].view(-1)
            if suspect.value is not None:
                cells[places[len(places) // 2 :]] = suspect.value
            elif uneven.row is not None:
                cells[places] = uneven.row.reshape(-1)[places]
        numbers = iter(range(len(tree.tensors(batch))))
        return tree.replace(batch, lambda t: fresh if next(numbers) == suspect.at else t)

    return [batch, changed(first), changed(second), changed(first, second)]
