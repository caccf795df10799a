"""The labels of a mini-batch, and the weight by which a loss over all of them would be divided.

A loss gets the labels of one micro-batch in its own form: flattened, or shifted by one token. Comparing them with the
batch's tensors shows which tensor they are, and in which form; the same form of the whole tensor then gives the weight
of all micro-batches before the first backward. After all micro-batches, their weights must add up to that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose, log2
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import InputError
from penstock.model import tree

Form = Callable[[torch.Tensor, int], torch.Tensor]
Weigh = Callable[[torch.Tensor, torch.Tensor | None, int], Any]


def _as_it_is(labels: torch.Tensor, ignored: int) -> torch.Tensor:
    return labels


def _shifted(labels: torch.Tensor, ignored: int) -> torch.Tensor:
    """Return each token's successor; the last has none."""
    return F.pad(labels, (0, 1), value=ignored)[..., 1:]


def _shortened(labels: torch.Tensor, ignored: int) -> torch.Tensor:
    return labels[..., 1:]


def _limited(labels: torch.Tensor, ignored: int) -> torch.Tensor:
    """Return the labels with positions outside of a text ignored."""
    return labels.clamp(0, max(ignored, 0))


FORMS: tuple[Form, ...] = (_as_it_is, _shifted, _shortened, _limited)


@dataclass
class Memory:
    """Facts learned from earlier mini-batches."""

    unit: float = 0.0  # divisor that makes weights about as large as the number of rows
    known: dict[int, list[tuple[int, Form]]] = field(default_factory=dict)  # by call: the tensors and forms that fit
    pure: bool | None = None  # whether the loss was a mean and nothing else

    def in_units(self, weight: Any, positions: int, rows: int) -> Any:
        """Divide a weight by a power of two, which changes no bits."""
        if not self.unit:
            self.unit = 2.0 ** round(log2(max(positions, 1) / rows))
        return weight / self.unit


@dataclass(frozen=True)
class Scored:
    """The kind of loss of one micro-batch."""

    rows: int
    kind: str  # "mean" over rows, "pure" (sum and weight by penstock), "sum" and weight by the user
    calls: tuple[tuple[Any, float | None], ...] = ()  # the call's weight, and the counted weight of the mini-batch
    nothing: bool = False  # a loss of 0 without a call


class Labels:
    """The labels of one mini-batch."""

    def __init__(
        self, batch: Any, spans: Sequence[tuple[int, int]], memory: Memory, weigh: Weigh, fixed: bool = False
    ) -> None:
        self.spans, self.memory, self.weigh = spans, memory, weigh
        self.fixed = fixed  # takes the weight of all as 1, for a single micro-batch
        self.rows = spans[-1][1] - spans[0][0]
        # Sums divided by this are parts of one sum, as in transformers' loss functions.
        self.sums = _named(batch, "num_items_in_batch")
        self.tensors = [
            t for t in tree.tensors(batch) if t.dim() and not (t.is_floating_point() or t.is_complex() or t.is_meta)
        ]
        self.totals: dict[Any, tuple[float, Any]] = {}  # with the class weights, so that their id() is not reused
        self.scored: dict[int, dict[int, Scored]] = {}  # by stage and micro-batch

    def part_rows(self, part: int) -> int:
        first, last = self.spans[part]
        return last - first

    def total(
        self, part: int, call: int, target: torch.Tensor, classes: torch.Tensor | None, ignored: int
    ) -> float | None:
        """Return the weight of the whole mini-batch; None where the labels match none of its tensors."""
        known = self.memory.known.get(call)
        found = [one for one in known or () if self._is(*one, part, target, ignored)]
        if not found:
            every = [(at, form) for at in range(len(self.tensors)) for form in FORMS]
            found = [one for one in every if self._is(*one, part, target, ignored)]
        self.memory.known[call] = found
        # Of tensors that are equal in this micro-batch, the labels are those with ignored values in others.
        return min((self._weight(*one, classes, ignored) for one in found), default=None)

    def share(self, part: int, weight: Any, total: float) -> Any:
        """Return the factor of a micro-batch's mean by which it counts by its weight instead of its rows."""
        if self.fixed:
            return weight
        rows = self.part_rows(part)
        if isinstance(weight, float) and (weight * self.rows == total * rows or not total):
            return 1.0
        return weight * self.rows / (total * rows)

    def note(self, stage: int, part: int, scored: Scored) -> None:
        """Record a micro-batch's kind of loss; raise if those of all micro-batches do not fit together."""
        if self.fixed:
            return
        met = self.scored.setdefault(stage, {})
        met[part] = scored
        if len(met) == sum(first < last for first, last in self.spans):
            every = [met[number] for number in sorted(met)]
            _require_one_kind(every)
            for call in range(max(len(one.calls) for one in every)):
                _require_total(every, call)

    def _is(self, at: int, form: Form, part: int, target: torch.Tensor, ignored: int) -> bool:
        if at >= len(self.tensors):
            return False
        labels = form(self.tensors[at][slice(*self.spans[part])], ignored)
        return labels.numel() == target.numel() and torch.equal(labels.reshape(-1).to(target.dtype), target.reshape(-1))

    def _weight(self, at: int, form: Form, classes: torch.Tensor | None, ignored: int) -> float:
        key = at, form, None if classes is None else id(classes), ignored
        if key not in self.totals:
            whole = self.tensors[at][self.spans[0][0] : self.spans[-1][1]]
            self.totals[key] = float(self.weigh(form(whole, ignored).long(), classes, ignored)), classes
        return self.totals[key][0]


def _named(value: Any, name: str) -> bool:
    """Whether a batch has a value of this name in one of its dicts."""
    if isinstance(value, Mapping):
        return value.get(name) is not None or any(_named(part, name) for part in value.values())
    return isinstance(value, (tuple, list)) and any(_named(part, name) for part in value)


_ADVICE = (
    "return (sum, weight) from the loss; where it is computed inside the model, leave the labels out and take "
    "it outside"
)


def _require_one_kind(every: list[Scored]) -> None:
    kinds = {one.kind for one in every if not one.nothing}
    kinds |= {one.kind for one in every if one.nothing and kinds == {"pure"}}
    if len(kinds) > 1 and "pure" in kinds:
        raise InputError(
            "all micro-batches of a mini-batch scored alike",
            "a mean over counted targets in some, and another loss in others",
            _ADVICE,
        )


def _require_total(every: list[Scored], call: int) -> None:
    """Raise unless the weights add up to the counted one or, where none was counted, are proportional to the rows."""
    means = [one for one in every if one.kind == "mean"]
    if not any(len(one.calls) > call for one in means):
        return
    met = [float(one.calls[call][0]) if len(one.calls) > call else 0.0 for one in means]
    counted = {one.calls[call][1] for weight, one in zip(met, means, strict=True) if weight}
    total, rows = sum(met), sum(one.rows for one in means)
    if not total:
        raise InputError("a batch whose loss has a positive weight", total, "skip batches without targets")
    if all(known is not None and isclose(known, total, rel_tol=1e-6) for known in counted):
        return
    if all(isclose(weight * rows, total * one.rows, rel_tol=1e-6) for weight, one in zip(met, means, strict=True)):
        return
    raise InputError(
        "a loss that is a mean over rows, or labels that are a tensor of the batch",
        f"means over {', '.join(f'{weight:g}' for weight in met[:8])}{' ...' if len(met) > 8 else ''} targets of "
        "micro-batches, whose weight in all could not be counted beforehand",
        _ADVICE,
    )
