"""Counts, in every batch, of values by which a loss may weigh its rows.

Such values are ignored labels, zeros of a mask, padding, and other marks for "nothing" (NaN, or the largest value, as
255 in an image of classes). Where micro-batches have unequal counts of one, loss_checks.py tests whether the loss
weighs by it, once for each tensor and kind of value. A loss may also weigh by values that nothing marks: lengths,
weights of rows, a token in the middle of a vocabulary. So it is tested on rows with another row's values, too, in the
first batches in which rows differ.
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

PADS = 8  # values of one tensor to test that end rows or are the largest: random data has many
ATTEMPTS = 3
SAMPLE = 512  # numbers of a tensor in which repeated ones are searched
WINDOW = 3  # rows that a loss is tested with

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Suspect:
    """A value of a tensor of the batch, or all its values."""

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
    """A suspect's counts in micro-batches, which are not proportional to their rows, and the other values by row."""

    suspect: Suspect
    counts: tuple[int, ...]
    kept: tuple[int, ...]
    others: frozenset[float]  # values that may mean the same, so that changing one into the suspect shows nothing
    row: torch.Tensor | None = None  # the row whose values others get, where the suspect is all values
    sure: bool = True  # the value makes no NaN but in a mean over nothing: not so a mask that layers attend by

    @property
    def window(self) -> tuple[int, int]:
        """The few rows with the most other values."""
        return _best(self.kept, _windows(len(self.kept)))[1]

    def micro_batch(self, cut: Spans) -> int | None:
        """Return the micro-batch with the most other values, or None where all have too few rows with some."""
        least, (first, last) = _best(self.kept, cut)
        return list(cut).index((first, last)) if least and (self.row is None or last - first >= WINDOW) else None


class LabelCounts:
    """Values of a pipeline's batches by which its loss weighs rows, and those by which it does not."""

    def __init__(self, layers: frozenset[str] = frozenset()) -> None:
        self.layers = layers  # places of inputs of the last stage's layers, which may mix rows as a loss may
        self.weighs: dict[Suspect, bool] = {}
        self.asked: Counter[Suspect] = Counter()

    def learn(self, suspect: Suspect, weighs: bool | None) -> None:
        """Note whether the loss weighs by a suspect, or None where a batch could not show it.

        After a few such batches the answer is no. Of all values together, one batch shows only those that one of its
        rows has more of than another.
        """
        self.asked[suspect] += 1
        settled = weighs or (weighs is not None and suspect.value is not None)
        if settled or self.asked[suspect] == ATTEMPTS:
            self.weighs[suspect] = bool(weighs)

    def uneven(self, batch: Any, cut: Spans) -> list[Uneven]:
        """Return values with unequal counts, except those by which the loss does not weigh.

        Sorted by place, as dicts may have another order on each rank.
        """
        suspects: list[Uneven] = []
        if len(cut) < 2:
            return suspects
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
                    candidates = _uneven(suspect, tensor, cut, frozenset(left_out) - {value, 0.0})
                    suspects += [replace(uneven, sure=place not in self.layers) for uneven in candidates]
            whole = Suspect(at, place, None)
            if _may_weigh(place, tensor) and place not in self.layers and self.weighs.get(whole, True):
                suspects += _unlike(whole, tensor, cut, left_out)
        return suspects

    def _marks(self, at: int, place: str, tensor: torch.Tensor, pads: list[float]) -> Iterator[float]:
        """Yield values of a tensor that may mean "do not count this"."""
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
        answers = {one.value: weighs for one, weighs in self.weighs.items() if (one.at, one.place) == (at, place)}
        yield from (value for value, weighs in answers.items() if weighs and value is not None and not isnan(value))
        if len(answers) < PADS:
            yield from pads
            yield from _repeated(tensor) if tensor.is_floating_point() else _largest(tensor)


def _largest(tensor: torch.Tensor) -> list[float]:
    """Return the largest number if it occurs more than once."""
    high = float(tensor.max())
    return [high] if high > 0 and bool((tensor == high).sum() > 1) else []


def _pads(tensor: torch.Tensor) -> list[float]:
    """Return the values that a row ends with twice."""
    if tensor.dim() != 2 or tensor.shape[1] < 2 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return []
    return sorted(value for value in set(tensor[:, -1][tensor[:, -1] == tensor[:, -2]].tolist()) if value > 0)


def _repeated(tensor: torch.Tensor) -> list[float]:
    """Return the most frequent number in a sample of a tensor if it occurs more than once."""
    few = tensor.flatten()[:: max(tensor.numel() // SAMPLE, 1)]
    value = few.mode().values
    return [float(value)] if bool((few == value).sum() > 1) and bool(value.isfinite()) else []


def _may_be_labels(place: str, tensor: torch.Tensor) -> bool:
    """Return True for whole numbers, masks and targets; images and features have many meaningless zeros."""
    if not tensor.dim() or not tensor.numel() or tensor.is_meta or tensor.is_complex():
        return False
    return tensor.dim() <= 2 or not tensor.is_floating_point() or place.split("/")[1] == "1"


def _may_weigh(place: str, tensor: torch.Tensor) -> bool:
    """Return True for numbers other than the pixels of an input."""
    return tensor.dtype != torch.bool and (tensor.dim() <= 2 or place.split("/")[1] == "1")


def _is(tensor: torch.Tensor, value: float) -> torch.Tensor:
    return tensor.isnan() if isnan(value) else tensor == value


def _windows(rows: int) -> list[tuple[int, int]]:
    return [(first, min(first + WINDOW, rows)) for first in range(max(rows - WINDOW, 0) + 1)]


def _best(kept: Sequence[int], spans: Spans) -> tuple[int, tuple[int, int]]:
    """Return the rows whose second largest count is the largest, and that count."""
    return max(((sorted(kept[first:last])[-2:-1] or [0])[0], (first, last)) for first, last in spans)


def _uneven(suspect: Suspect, tensor: torch.Tensor, cut: Spans, others: frozenset[float]) -> list[Uneven]:
    assert suspect.value is not None
    equal = _is(tensor, suspect.value)
    by_row = equal.reshape(len(tensor), -1).sum(1).tolist() if tensor.dim() > 1 else equal.int().tolist()
    counts = tuple(sum(by_row[first:last]) for first, last in cut)
    rows, total = cut[-1][1] - cut[0][0], sum(counts)
    if all(count * rows == total * (last - first) for count, (first, last) in zip(counts, cut, strict=True)):
        return []
    for same in (others, frozenset[float]()):  # a mask has only two values
        uneven = Uneven(suspect, counts, (), same)
        kept = _ordinary(tensor, uneven).reshape(len(tensor), -1).sum(1).tolist()
        if _best(kept, _windows(rows))[0]:
            break
    return [replace(uneven, kept=tuple(kept))]


def _unlike(suspect: Suspect, tensor: torch.Tensor, cut: Spans, marks: Sequence[float]) -> list[Uneven]:
    """Return all values of a tensor as a suspect where micro-batches differ; the marks keep their places."""
    rows = cut[-1][1] - cut[0][0]
    parts = [tensor[first:last].flatten().sort().values for first, last in cut]
    if rows < WINDOW or all(torch.equal(part, parts[0]) for part in parts[1:]):
        return []
    usual = torch.ones_like(tensor, dtype=torch.bool)
    for mark in marks:
        usual &= ~_is(tensor, mark)
    flat, usual = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None], usual.reshape(len(tensor), -1)
    sums = flat.double().where(usual, 0.0).sum(1)
    candidates = []
    for row in (int(sums.argmax()), int(sums.argmin())):
        kept = (usual & usual[row] & (flat != flat[row])).sum(1).tolist()
        candidates.append(Uneven(suspect, (), tuple(kept), frozenset(marks), tensor[row], sure=False))
    return [max(candidates, key=lambda one: _best(one.kept, _windows(rows))[0])]


def _ordinary(tensor: torch.Tensor, uneven: Uneven) -> torch.Tensor:
    """Return the mask of values that are neither the suspect nor may mean the same.

    Where the suspect is all values, of values that also differ from those of `uneven.row`.
    """
    ordinary = torch.ones_like(tensor, dtype=torch.bool)
    for value in uneven.others:
        ordinary &= ~_is(tensor, value)
        if uneven.row is not None:
            ordinary &= ~_is(uneven.row, value)
    if uneven.row is not None:
        return ordinary & (tensor != uneven.row)
    assert uneven.suspect.value is not None
    return ordinary & ~_is(tensor, uneven.suspect.value)


def variants(batch: Any, uneven: Uneven) -> list[Any] | None:
    """Return a batch of a few rows as it is, with the suspect put into one row, into another, and into both.

    None where the rows have too few other values.
    """
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
