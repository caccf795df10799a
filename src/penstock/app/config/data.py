"""Batches to train on: text that ships with Python or the user's own, digits, or the output of a user's function.

Batch k depends on the seed and on k alone, so that every rank makes the same batches and a run can be continued. A
share of text or digits, or the output of another function, is held out for validation and never trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import FormatError, InputError
from penstock.model.seeding import mixed

Batch = tuple[Any, Any]  # inputs, target
HELD_OUT = -1  # used in place of a batch's number, for the held-out rows
SECTIONS = 20  # of a text, each of which ends in held-out text, because the parts of a text differ


class Data(Protocol):
    """The data of a task."""

    vocab: int | None  # number of different tokens, where there are tokens

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """Yield batches without end, from number `first` on."""

    def validation(self) -> Iterator[Batch]:
        """Yield all held-out batches once; none where nothing is held out."""


class TextData:
    """Windows of a text at random places; the target is the same text, shifted by one token.

    The share `validation` of the text is held out, a part of every section; windows to train on end before it.
    """

    def __init__(
        self, text: str | bytes, rows: int, length: int, seed: int = 0, validation: float | None = None
    ) -> None:
        if len(text) <= length:
            raise InputError(f"a text of more than {length} tokens", len(text), "give more text, or a smaller length")
        self.in_bytes = isinstance(text, bytes)
        self.alphabet = list(map(chr, range(256))) if isinstance(text, bytes) else sorted(set(text))
        self.vocab: int | None = len(self.alphabet)
        numbers = {token: number for number, token in enumerate(self.alphabet)}
        codes = text if isinstance(text, bytes) else [numbers[token] for token in text]
        self.tokens = torch.tensor(list(codes), device="cpu")
        self.rows, self.length, self.seed = rows, length, seed
        self.starts: Tensor | None = None  # start of each window to train on; None: anywhere
        self.held_out: Tensor | None = None
        if validation is not None:
            self.starts, self.held_out = self._hold_out(validation)

    def batches(self, first: int = 0) -> Iterator[Batch]:
        number = first
        while True:
            yield self.batch(number)
            number += 1

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        places = len(self.tokens) - self.length if self.starts is None else len(self.starts)
        drawn = torch.randint(places, (self.rows, 1), generator=_source(self.seed, number))
        return self._windows(drawn if self.starts is None else self.starts[drawn])

    def validation(self) -> Iterator[Batch]:
        if self.held_out is not None:
            yield from map(self._windows, _split(self.held_out, self.rows))

    def unigram_entropy(self) -> float:
        """Return the entropy of single tokens in the held-out text: the best loss that their frequencies allow."""
        counts = torch.cat([target.flatten() for _, target in self.validation()]).bincount()
        shares = counts[counts > 0].double() / counts.sum()
        return -float((shares * shares.log()).sum())

    def text(self, tokens: Tensor) -> str:
        """Return tokens as text."""
        if self.in_bytes:
            return bytes(tokens.tolist()).decode(errors="replace")
        return "".join(self.alphabet[number] for number in tokens.tolist())

    def _windows(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = self.tokens[starts + torch.arange(self.length + 1, device="cpu")]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _hold_out(self, share: float) -> tuple[Tensor, Tensor]:
        """Return the starts of windows to train on, and those of held-out windows, which overlap by one token."""
        window = self.length + 1
        sections = max(1, min(SECTIONS, int(len(self.tokens) * share) // window))
        ends = [len(self.tokens) * number // sections for number in range(sections + 1)]
        train, held_out = [], []
        for first, last in pairwise(ends):
            border = last - round((last - first) * share)
            train.append(torch.arange(first, max(first, border - self.length), device="cpu"))
            held_out.append(torch.arange(border, max(border, last - self.length), self.length, device="cpu"))
        starts, held = torch.cat(train), torch.cat(held_out)
        for part, name in ((held, "hold out"), (starts, "train on")):
            if not len(part):
                expected = f"a share that leaves a window of {window} tokens to {name}"
                advice = "change it, give more text, or a smaller length"
                raise FormatError("data.validation", expected, f"{share} of {len(self.tokens)} tokens", advice)
        return starts, held[:, None]


class RowsData:
    """Rows drawn from a table, such as digits. The share `validation`, drawn from the seed too, is held out."""

    vocab: int | None = None

    def __init__(
        self, inputs: Tensor, target: Tensor, rows: int, seed: int = 0, validation: float | None = None
    ) -> None:
        self.inputs, self.target, self.rows, self.seed = inputs, target, rows, seed
        self.train: Tensor | None = None  # rows to train on; None: all
        self.held_out: Tensor | None = None
        if validation is not None:
            self.train, self.held_out = self._hold_out(validation)

    def batches(self, first: int = 0) -> Iterator[Batch]:
        number = first
        while True:
            places = len(self.inputs) if self.train is None else len(self.train)
            chosen = torch.randint(places, (self.rows,), generator=_source(self.seed, number))
            yield self._rows(chosen if self.train is None else self.train[chosen])
            number += 1

    def validation(self) -> Iterator[Batch]:
        if self.held_out is not None:
            yield from map(self._rows, _split(self.held_out, self.rows))

    def _rows(self, rows: Tensor) -> Batch:
        return self.inputs[rows], self.target[rows]

    def _hold_out(self, share: float) -> tuple[Tensor, Tensor]:
        count = len(self.inputs)
        held_out = round(count * share)
        if not 0 < held_out < count:
            expected = "a share that leaves a row to hold out and one to train on"
            raise FormatError("data.validation", expected, f"{share} of {count} rows", "change it")
        order = torch.randperm(count, generator=_source(self.seed, HELD_OUT), device="cpu")
        return order[held_out:], order[:held_out]


class GivenData:
    """The batches of a user's function, repeated without end, and those of another function for validation."""

    vocab: int | None = None

    def __init__(
        self, make: Callable[[], Iterable[Batch]], make_validation: Callable[[], Iterable[Batch]] | None = None
    ) -> None:
        self.make, self.make_validation = make, make_validation

    def batches(self, first: int = 0) -> Iterator[Batch]:
        return islice(self._endless(), first, None)

    def validation(self) -> Iterator[Batch]:
        if self.make_validation is not None:
            yield from map(_pair, _iterable(self.make_validation()))

    def _endless(self) -> Iterator[Batch]:
        while True:
            count = 0
            for pair in _iterable(self.make()):
                count += 1
                yield _pair(pair)
            if not count:
                raise InputError("data with at least one batch", "none", "let the function give (inputs, target)")


def built_in_text() -> str:
    """Return the manual pages that ship with Python: real text that is always available."""
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics))


def read_text(path: str, as_bytes: bool) -> str | bytes:
    """Return the user's text file."""
    try:
        return Path(path).read_bytes() if as_bytes else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FormatError("data.path", f"a file {path!r} that can be read", error.strerror, "check the path") from None
    except UnicodeDecodeError:
        came, advice = f"{path!r}, which is not", 'set data.tokens = "bytes"'
        raise FormatError("data.path", "a text file in UTF-8", came, advice) from None


def digits(rows: int, seed: int, validation: float | None = None) -> RowsData:
    """Return scikit-learn's 1797 small handwritten digits: 64 numbers from 0 to 1 each, in ten classes."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ModuleNotFoundError:
        advice = "pip install scikit-learn, or choose other data"
        raise FormatError("data.kind", "scikit-learn, which holds the digits", "none installed", advice) from None
    table = load_digits()
    inputs = torch.tensor(table.data, dtype=torch.float32, device="cpu") / 16
    return RowsData(inputs, torch.tensor(table.target, device="cpu"), rows, seed, validation)


def _source(seed: int, number: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(mixed(seed, number))


def _split(places: Tensor, rows: int) -> Iterator[Tensor]:
    """Split into groups of `rows`; the last may be smaller."""
    return (places[at : at + rows] for at in range(0, len(places), rows))


def _iterable(batches: Any) -> Iterable[Any]:
    if isinstance(batches, Iterable):
        return batches
    raise InputError("data's function to give an iterable", type(batches).__name__, "return a list or a loader")


def _pair(pair: Any) -> Batch:
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        return pair[0], pair[1]
    came = f"{len(pair)} values" if isinstance(pair, (tuple, list)) else type(pair).__name__
    raise InputError("each batch to be (inputs, target)", came, "give pairs")
