"""Batches to train on: text that ships with Python or the user's own, digits, or whatever a function gives.

Batch k depends on the seed and on k alone, so that every rank makes the same ones and a run can go on where it stopped.
A share of text or digits, or what another function gives, is held out for validation: no batch to train on holds any.
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
HELD_OUT = -1  # in place of a batch's number, for what is drawn once
SECTIONS = 20  # of a text, each of which ends in held-out text: its parts differ more than their letters do


class Data(Protocol):
    vocab: int | None  # how many different tokens there are, where there are tokens

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """Batches without end, from number `first` on."""

    def validation(self) -> Iterator[Batch]:
        """All held-out batches, once; none where nothing is held out."""


class TextData:
    """Windows of a text, at places drawn from the seed; the target is the same text one token further.

    The share `validation` of the text is held out, a part of every section: windows to train on end before it.
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
        known = text if isinstance(text, bytes) else [numbers[token] for token in text]
        self.tokens = torch.tensor(list(known), device="cpu")
        self.rows, self.length, self.seed = rows, length, seed
        self.starts: Tensor | None = None  # of windows to train on; None: anywhere
        self.held_out: Tensor | None = None
        if validation is not None:
            self.starts, self.held_out = self._parted(validation)

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
        """The loss that the frequencies of single tokens allow at best, on the held-out text."""
        counts = torch.cat([target.flatten() for _, target in self.validation()]).bincount()
        shares = counts[counts > 0].double() / counts.sum()
        return -float((shares * shares.log()).sum())

    def text(self, tokens: Tensor) -> str:
        """Tokens as people read them."""
        if self.in_bytes:
            return bytes(tokens.tolist()).decode(errors="replace")
        return "".join(self.alphabet[number] for number in tokens.tolist())

    def _windows(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = self.tokens[starts + torch.arange(self.length + 1, device="cpu")]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _parted(self, share: float) -> tuple[Tensor, Tensor]:
        """Where windows to train on may start, one a row; and where those held out do, which overlap by one token."""
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
    """Rows drawn from a table of them: digits, say. The share `validation`, drawn from the seed too, is held out."""

    vocab: int | None = None

    def __init__(
        self, inputs: Tensor, target: Tensor, rows: int, seed: int = 0, validation: float | None = None
    ) -> None:
        self.inputs, self.target, self.rows, self.seed = inputs, target, rows, seed
        self.train: Tensor | None = None  # rows to train on; None: all
        self.held_out: Tensor | None = None
        if validation is not None:
            self.train, self.held_out = self._parted(validation)

    def batches(self, first: int = 0) -> Iterator[Batch]:
        number = first
        while True:
            places = len(self.inputs) if self.train is None else len(self.train)
            chosen = torch.randint(places, (self.rows,), generator=_source(self.seed, number))
            yield self._chosen(chosen if self.train is None else self.train[chosen])
            number += 1

    def validation(self) -> Iterator[Batch]:
        if self.held_out is not None:
            yield from map(self._chosen, _split(self.held_out, self.rows))

    def _chosen(self, rows: Tensor) -> Batch:
        return self.inputs[rows], self.target[rows]

    def _parted(self, share: float) -> tuple[Tensor, Tensor]:
        count = len(self.inputs)
        held_out = round(count * share)
        if not 0 < held_out < count:
            expected = "a share that leaves a row to hold out and one to train on"
            raise FormatError("data.validation", expected, f"{share} of {count} rows", "change it")
        order = torch.randperm(count, generator=_source(self.seed, HELD_OUT), device="cpu")
        return order[held_out:], order[:held_out]


class GivenData:
    """What the user's function gives, from its beginning again when it ends; and what another gives for validation."""

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
            came = 0
            for pair in _iterable(self.make()):
                came += 1
                yield _pair(pair)
            if not came:
                raise InputError("data with at least one batch", "none", "let the function give (inputs, target)")


def built_in_text() -> str:
    """The manual's pages on Python that ship with it: real text, everywhere at hand."""
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics))


def read_text(path: str, as_bytes: bool) -> str | bytes:
    """The user's own file."""
    try:
        return Path(path).read_bytes() if as_bytes else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FormatError("data.path", f"a file {path!r} that can be read", error.strerror, "check the path") from None
    except UnicodeDecodeError:
        came, advice = f"{path!r}, which is not", 'set data.tokens = "bytes"'
        raise FormatError("data.path", "a text file in UTF-8", came, advice) from None


def digits(rows: int, seed: int, validation: float | None = None) -> RowsData:
    """The 1797 small handwritten digits of scikit-learn: 64 numbers from 0 to 1 each, ten classes."""
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
    """So many rows at a time; the last ones may be fewer."""
    return (places[at : at + rows] for at in range(0, len(places), rows))


def _iterable(found: Any) -> Iterable[Any]:
    if isinstance(found, Iterable):
        return found
    raise InputError("data's function to give an iterable", type(found).__name__, "return a list or a loader")


def _pair(pair: Any) -> Batch:
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        return pair[0], pair[1]
    came = f"{len(pair)} values" if isinstance(pair, (tuple, list)) else type(pair).__name__
    raise InputError("each batch to be (inputs, target)", came, "give pairs")
