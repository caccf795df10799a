"""What stages and micro-batches compute alike is computed once, and never where it would be something else."""

from __future__ import annotations

import pytest
import torch
from compare import assert_same, pipeline, plain, stepped
from torch import nn
from zoo import WIDTH, Of, blocks, floats

LENGTH = 6


pytestmark = pytest.mark.usefixtures("one_thread")


def ids(rows, longest):
    """Rows of words, of which 0 is padding; in the last columns there is nothing else."""
    words = torch.randint(1, 20, (rows, LENGTH))
    words[:, longest:] = 0
    return words


class Filled(nn.Embedding):
    """The columns that hold a word in any row: the shape of the result depends on the data."""

    def forward(self, words):
        return super().forward(words[:, : int((words > 0).any(0).sum())])


def padded(decides):
    def body(m, words):
        x = m.blocks[0](m.table(words))
        places = m.places(torch.arange(x.shape[1])).mean(0)  # one vector, of any length
        if decides and (words < 20).all():
            x = x.tanh()
        return m.blocks[2](m.blocks[1](x + places))

    return Of(body, table=Filled(20, WIDTH), places=nn.Embedding(LENGTH, WIDTH), blocks=blocks(3)).double()


@pytest.mark.parametrize("decides", [True, False])
@pytest.mark.parametrize("cuts", [["blocks.1", "blocks.2"], ["blocks.0", "blocks.2"]])
def test_what_goes_by_a_shape_that_depends_on_data_is_computed_for_each_micro_batch(cuts, decides):
    model = padded(decides)
    pipe = pipeline(model, ids(2, LENGTH), cuts=cuts)
    for longest in ((6, 3, 6), (3, 3, 5), (2, 6, 4)):
        batch = torch.cat([ids(2, length) for length in longest])
        assert_same(stepped(pipe, batch), plain(model, batch, parts=3))


ENTERED = []


def looking(m, x):
    """Open code that looks at numbers which depend on shapes alone, as a Llama's does."""
    places = torch.arange(x.shape[1])
    ENTERED.append(id(places))
    if (places.diff() == 1).all():
        x = x * 2
    x = x + places[:, None]
    for block in m.blocks:
        x = block(x)
    return x


@pytest.mark.parametrize("stages", [2, 4])
def test_a_look_at_what_depends_on_shapes_alone_takes_no_walk_of_its_own(stages):
    model = Of(looking, blocks=blocks(4)).double()
    pipe = pipeline(model, floats(2, LENGTH, WIDTH), cuts=[f"blocks.{4 // stages * at}" for at in range(1, stages)])
    batch = floats(6, LENGTH, WIDTH)
    wanted = plain(model, batch)
    for _ in range(2):
        assert_same(stepped(pipe, batch), wanted)
        batch = -batch
        wanted = plain(model, batch)
    ENTERED.clear()
    assert_same(stepped(pipe, batch), wanted)
    assert len(ENTERED) == stages * pipe.microbatches
    assert len(set(ENTERED)) == 1  # and all use the same


def test_micro_batches_of_other_lengths_have_nothing_of_that_in_common():
    model = Of(looking, blocks=blocks(4)).double()
    pipe = pipeline(model, floats(2, LENGTH, WIDTH), cuts=["blocks.2"])
    for rows, length in ((7, LENGTH), (6, 4), (7, 9), (6, LENGTH)):
        batch = floats(rows, length, WIDTH)
        assert_same(stepped(pipe, batch), plain(model, batch))


def choosing(m, x):
    """A look at a buffer, after one at numbers that depend on shapes."""
    x = m.blocks[0](x)
    places = torch.arange(x.shape[1])
    if (places >= 0).all() and (m.sign * places).sum() > 0:
        x = x.tanh()
    return m.blocks[2](m.blocks[1](x))


def test_a_look_at_a_buffer_is_still_a_decision():
    model = Of(choosing, blocks=blocks(3)).double()
    model.register_buffer("sign", torch.ones(()))
    pipe = pipeline(model, floats(2, LENGTH, WIDTH), cuts=["blocks.1"])
    for sign in (1, -1, 1):
        model.sign.fill_(sign)
        batch = floats(6, LENGTH, WIDTH)
        assert_same(stepped(pipe, batch), plain(model, batch))
