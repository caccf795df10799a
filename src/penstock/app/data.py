"""Batches to train on: text that ships with Python or the user's own, digits, or whatever a function gives.

Batch k depends on the seed and on k alone, so that every rank makes the same ones and a run can go on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import FormatError, InputError
from penstock.model.seeding import mixed

Batch = tuple[Any, Any]  # inputs, target


class Data(Protocol):
    vocab: int | None  # how many different tokens there are, where there are tokens

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """Batches without end, from number `first` on."""


class TextData:
    """Windows of a text, at places drawn from the seed; the target is the same text one token further."""

    def __init__(self, text: str | bytes, rows: int, length: int, seed: int = 0) -> None:
        if len(text) <= length:
            raise InputError(f"a text of more than {length} tokens", len(text), "give more text, or a smaller length")
        self.alphabet = sorted(set(text)) if isinstance(text, str) else list(range(256))
        self.vocab: int | None = len(self.alphabet)
        numbers = {token: number for number, token in enumerate(self.alphabet)}
        self.tokens = torch.tensor([numbers[token] for token in text], device="cpu")
        self.rows, self.length, self.seed = rows, length, seed

    def batches(self, first: int = 0) -> Iterator[Batch]:
        number = first
        while True:
            yield self.batch(number)
            number += 1

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.tokens) - self.length, (self.rows, 1), generator=_source(self.seed, number))
        windows = self.tokens[starts + torch.arange(self.length + 1, device="cpu")]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class RowsData:
    """Rows drawn from a table of them: digits, say."""

    vocab: int | None = None

    def __init__(self, inputs: Tensor, target: Tensor, rows: int, seed: int = 0) -> None:
        self.inputs, self.target, self.rows, self.seed = inputs, target, rows, seed

    def batches(self, first: int = 0) -> Iterator[Batch]:
        number = first
        while True:
            chosen = torch.randint(len(self.inputs), (self.rows,), generator=_source(self.seed, number))
            yield self.inputs[chosen], self.target[chosen]
            number += 1


class GivenData:
    """What the user's function gives, from its beginning again when it ends."""

    vocab: int | None = None

    def __init__(self, make: Callable[[], Iterable[Batch]]) -> None:
        self.make = make

    def batches(self, first: int = 0) -> Iterator[Batch]:
        return islice(self._endless(), first, None)

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


def digits(rows: int, seed: int) -> RowsData:
    """The 1797 small handwritten digits of scikit-learn: 64 numbers from 0 to 1 each, ten classes."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ModuleNotFoundError:
        advice = "pip install scikit-learn, or choose other data"
        raise FormatError("data.kind", "scikit-learn, which holds the digits", "none installed", advice) from None
    table = load_digits()
    inputs = torch.tensor(table.data, dtype=torch.float32, device="cpu") / 16
    return RowsData(inputs, torch.tensor(table.target, device="cpu"), rows, seed)


def _source(seed: int, number: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(mixed(seed, number))


def _iterable(found: Any) -> Iterable[Any]:
    if isinstance(found, Iterable):
        return found
    raise InputError("data's function to give an iterable", type(found).__name__, "return a list or a loader")


def _pair(pair: Any) -> Batch:
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        return pair[0], pair[1]
    came = f"{len(pair)} values" if isinstance(pair, (tuple, list)) else type(pair).__name__
    raise InputError("each batch to be (inputs, target)", came, "give pairs")
