"""Batches cut into micro-batches by rows, and results put together again: exactly, or not at all."""

from __future__ import annotations

import collections
import types

import numpy as np
import pytest
import torch
from compare import assert_same, assert_same_result, pipeline, plain, stepped
from torch import nn
from zoo import WIDTH, WORDS, Of, blocks, floats, words

from penstock.model import tree
from penstock.model.batch import ApartError, as_call, join, piece, rows_of, uneven_spans

pytestmark = pytest.mark.usefixtures("one_thread")


def row(rows=4, length=6):
    return floats(rows, length, WIDTH)


def through(m, x):
    for block in m.blocks:
        x = block(x)
    return x


def stack(body=through, **parts):
    return Of(body, blocks=blocks(4), **parts).double()


# putting together


@pytest.mark.parametrize("rows", [2, 3, 4, 6, 8, 9])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_state_of_an_lstm_with_as_many_layers_as_a_micro_batch_has_rows(rows, layers):
    model = Of(
        lambda m, x: m.two(*m.one(x)), **{n: nn.LSTM(WIDTH, WIDTH, layers, batch_first=True) for n in ("one", "two")}
    ).double()
    pipe = pipeline(model, row(2), stages=2, microbatches=4)
    with torch.no_grad():
        batch = row(rows)
        assert_same_result(pipe.forward(batch), model(batch))


RESULTS = {
    "a constant as long as a micro-batch": lambda m, x, y: (y, torch.tensor([1.0, 2.0], dtype=x.dtype)),
    "a constant square": lambda m, x, y: (y, torch.ones(2, 2, dtype=x.dtype)),
    "a sum": lambda m, x, y: (y, y.sum()),
    "a mean": lambda m, x, y: (y, y.mean()),
    "rows against rows": lambda m, x, y: (y, torch.einsum("abc,dbc->ad", y, y)),
    "rows folded": lambda m, x, y: y.flatten(0, 1),
    "rows last": lambda m, x, y: {"rows": y.sum(1).T, "none": None},
    "a count": lambda m, x, y: {"y": y, "rows": len(x), "name": "same"},
    "a list of rows": lambda m, x, y: (y, [one * 2 for one in y]),
    "sums over rows in a dimension": lambda m, x, y: (y, y.sum(0)),
}


@pytest.mark.parametrize("rows", [4, 8, 7])
@pytest.mark.parametrize("what", RESULTS)
def test_results_of_every_kind_are_the_whole_models(what, rows):
    model = stack(lambda m, x: RESULTS[what](m, x, through(m, x)))
    pipe = pipeline(model, row(2), cuts=["blocks.1", "blocks.2"], microbatches=4, verify=False)
    with torch.no_grad():
        for _ in range(2):
            batch = row(rows)
            ours, theirs = pipe.forward(batch), model(batch)
            assert_same_result(ours, theirs)
            plain_ = [[leaf for leaf in tree.leaves(r) if not isinstance(leaf, torch.Tensor)] for r in (ours, theirs)]
            assert plain_[0] == plain_[1]


def test_a_state_that_counts_forwards_counts_a_batch_that_runs_again_as_it_would():
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model = Of(lambda m, x: m.two(m.one(x)).sum(), one=Counts(WIDTH, 2), two=nn.Linear(2, 2)).double()
    pipe = pipeline(model, row(2), stages=2, microbatches=4)
    pipe.forward(row(8))
    assert model.one.calls == 1


def test_what_cannot_be_joined_says_so():
    parts = [floats(3, 3), floats(2, 2)]
    with pytest.raises(ApartError, match="shapes"):
        join(parts, [3, 2], sure=True)
    with pytest.raises(ApartError, match="3 in one"):
        join([{"n": 3}, {"n": 2}], [3, 2], sure=True)
    with pytest.raises(ApartError, match="lengths"):
        join([[1, 2], [1]], [2, 1], sure=True)


@pytest.mark.parametrize("rows", range(1, 12))
@pytest.mark.parametrize("parts", range(1, 6))
def test_uneven_spans_cover_all_rows_and_have_two_sizes(rows, parts):
    found = uneven_spans(rows, parts)
    assert [first for first, _ in found] == [0, *(last for _, last in found[:-1])]
    assert found[-1][1] == rows
    sizes = [last - first for first, last in found]
    assert min(sizes) > 0
    assert len(found) <= parts
    assert len(found) == 1 or len(set(sizes)) > 1
    assert len(found) >= min(parts, rows - 1)


# cutting


def test_lists_arrays_and_words_with_one_entry_a_row_are_cut():
    names = ["a", "b", "c", "d"]
    batch = {
        "x": row(4),
        "names": names,
        "kinds": ("k", "l", "m", "n"),
        "ages": [1, 2, 3, 4],
        "array": np.arange(8).reshape(4, 2),
        "table": np.arange(3),
        "size": (4, 4, 4, 4),
        "short": ["p", "q"],
        "layers": [row(4), row(4), row(4), row(4)],
    }
    found = piece(batch, 1, 3)
    assert found["names"] == ["b", "c"]
    assert found["kinds"] == ("l", "m")
    assert found["ages"] == [2, 3]
    assert found["array"].tolist() == [[2, 3], [4, 5]]
    assert found["table"].tolist() == [0, 1, 2]
    assert found["size"] == (4, 4, 4, 4)
    assert found["short"] == ["p", "q"]
    assert [len(t) for t in found["layers"]] == [2] * 4
    assert piece(names, 1, 3, 4) == ["b", "c"]
    assert piece((("a", "b"), {"x": row(2)}), 0, 1)[0] == ("a", "b")
    assert rows_of({"a": np.zeros((3, 2)), "n": 4}) == 3


@pytest.mark.cpu_only
def test_a_model_that_takes_words_and_arrays_for_each_row():
    table = {f"w{at}": at for at in range(WORDS)}

    def body(m, x, names, weights):
        ids = torch.tensor([table[name] for name in names])
        x = m.blocks[0](x) + m.words(ids)[:, None]
        return m.blocks[2](m.blocks[1](x)) * torch.from_numpy(weights)[:, None, None]

    model = stack(body, words=nn.Embedding(WORDS, WIDTH))

    def made(rows):
        names = [f"w{int(at)}" for at in words(1, rows)[0]]
        return {"x": row(rows), "names": names, "weights": np.random.default_rng(rows).random(rows)}

    pipe = pipeline(model, made(4), cuts=["blocks.1", "blocks.2"])
    for rows in (6, 7, 6, 6):
        batch = made(rows)
        assert_same(stepped(pipe, batch), plain_by_rows(model, batch))
    assert sum(map(len, pipe.split.paths.values())) <= 2  # other words are no other path


def plain_by_rows(model, batch):
    """As `plain`, which knows tensors alone."""
    loss, found = plain(Of(lambda m, x: m.inner(**batch | {"x": x}), inner=model), batch["x"])
    return loss, {name.removeprefix("inner."): gradient for name, gradient in found.items()}


def test_a_list_of_words_as_the_target():
    def loss(result, target):
        assert len(result) == len(target)
        factors = torch.tensor([float(word) for word in target], dtype=torch.float64)
        return (result.mean((1, 2)) * factors).mean()

    model = stack()
    pipe = pipeline(model, row(), stages=2, loss=loss)
    batch, target = row(7), [str(at) for at in range(7)]
    found = pipe.step(batch, target).loss
    assert found == pytest.approx(loss(model(batch), target).item(), rel=1e-12)


# dicts of other kinds


class Encoding(collections.UserDict):
    """As tokenizers of transformers give."""

    def __init__(self, data=None, source="tokenizer"):
        super().__init__(data)
        self.source = source


def test_a_user_dict_as_inputs():
    model = Of(lambda m, ids, scale: through(m, m.words(ids)) * scale[:, None, None], words=nn.Embedding(WORDS, WIDTH))
    model.blocks = blocks(4)
    model.double()
    batch = Encoding({"ids": words(6, 5), "scale": floats(6)})
    assert as_call(batch)[0] == ()
    pipe = pipeline(model, Encoding({"ids": words(4, 5), "scale": floats(4)}), stages=2)
    assert_same(stepped(pipe, batch), plain(model, dict(batch)))


def test_a_user_dict_inside_the_inputs_is_rebuilt_as_it_was():
    batch = Encoding({"ids": words(6, 5)}, source="mine")
    part = piece((batch, 3), 1, 3)[0]
    assert type(part) is Encoding
    assert part.source == "mine"
    assert len(part["ids"]) == 2
    assert len(batch["ids"]) == 6
    fixed = piece(types.MappingProxyType({"ids": words(6, 5)}), 1, 3)
    assert type(fixed) is types.MappingProxyType
    assert len(fixed["ids"]) == 2
