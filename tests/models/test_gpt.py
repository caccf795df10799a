"""The small GPT: shapes, the tied weight, causality, dropout, and that a pipeline splits it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from penstock import Pipeline
from penstock.models.gpt import GPT

SMALL = {"vocab": 11, "width": 8, "heads": 2, "layers": 4, "length": 6}


def gpt(**changes):
    torch.manual_seed(0)
    return GPT(**SMALL | changes)


def ids(rows=3, length=6):
    return torch.randint(0, 11, (rows, length), generator=torch.Generator().manual_seed(1))


def test_scores_every_next_token_of_texts_up_to_its_length():
    model = gpt()
    assert model(ids()).shape == (3, 6, 11)
    assert model(ids(length=2)).shape == (3, 2, 11)


def test_sizes_are_the_arguments():
    model = gpt(width=16, heads=4, layers=3)
    block = 4 * 16 * 16 + 16 + 8 * 16 * 16 + 5 * 16 + 4 * 16
    assert sum(p.numel() for p in model.parameters()) == 11 * 16 + 6 * 16 + 3 * block + 2 * 16
    assert len(model.blocks) == 3
    assert model.blocks[0].attention.heads == 4


def test_the_head_is_the_token_table():
    model = gpt()
    assert model.head.weight is model.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_no_place_sees_what_comes_after_it():
    model, text = gpt(), ids()
    before = model(text)
    text[:, 4] = (text[:, 4] + 1) % 11
    after = model(text)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_a_fresh_model_knows_nothing():
    scores, others = gpt(vocab=100, width=32)(ids(8)), torch.arange(48) % 89 + 11
    assert F.cross_entropy(scores.flatten(0, 1), others).item() == pytest.approx(math.log(100), rel=0.02)


def test_dropout_is_drawn_while_training_only():
    model, text = gpt(dropout=0.5), ids()
    assert not torch.equal(model(text), model(text))
    model.eval()
    assert torch.equal(model(text), model(text))
    assert torch.equal(gpt()(text), gpt()(text))


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="3 heads can share, but got 8"):
        gpt(heads=3)


def test_a_pipeline_cuts_it_between_blocks():
    model = gpt(layers=6)
    pipe = Pipeline(model, example=ids(2), stages=3, microbatches=2)
    assert [name for name, _ in pipe.split.cuts] == ["blocks.2", "blocks.4"]
    assert torch.allclose(pipe.forward(ids()), model(ids()), atol=1e-6)
