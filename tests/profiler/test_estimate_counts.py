"""Counted work: operations equal hand formulas, for forward, input and weight gradient; bytes too, where easy."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import penstock
from model.zoo import ZOO, born
from penstock.app.profile.estimate import as_loss
from penstock.core.profile import Sent
from penstock.model.batch import as_call
from penstock.model.fakes import HOME, faked
from penstock.model.layers import layers_of
from penstock.model.passage import Passage
from penstock.model.stage import Job, Settings
from penstock.profiler.attention import fused_attention
from penstock.profiler.counting import Counting, bytes_moved, flops
from penstock.profiler.layer_work import count_work

size = st.integers(1, 9)
BF16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def rehearsed(model, example, fake=True, autocast=nullcontext):
    """The layers' names, their work, and what they send."""
    args, kwargs = as_call(example)
    with faked(model) if fake else nullcontext():
        layers = layers_of(model, args, kwargs)
        path = layers.split.first
        job = Job(0, -1, args, kwargs, 1, path, as_loss, passage=Passage.of(path.trace))
        done = count_work(layers, job, Settings(HOME, autocast=autocast))
    return layers.names, done.work, done.sent


def counts(work):
    return flops(work.forward), flops(work.input_grad), flops(work.weight_grad)


@given(rows=size, length=size, a=size, b=size, c=size)
@settings(max_examples=10, deadline=None)
def test_linear_layers(rows, length, a, b, c):
    model = nn.Sequential(nn.Linear(a, b), nn.Linear(b, c, bias=False))
    _, (first, second), _ = rehearsed(model, torch.zeros(rows, length, a))
    product = 2 * rows * length
    assert counts(first) == (product * a * b, 0, product * a * b)  # nobody wants the gradient of the inputs
    assert counts(second) == (product * b * c,) * 3


@given(rows=size, a=size, b=size, kernel=st.integers(1, 3), groups=st.integers(1, 2), stride=st.integers(1, 2))
@settings(max_examples=10, deadline=None)
def test_convolutions(rows, a, b, kernel, groups, stride):
    a, b = a * groups, b * groups
    model = nn.Sequential(nn.Conv2d(3, a, 1), nn.Conv2d(a, b, kernel, stride=stride, groups=groups))
    _, (_, layer), _ = rehearsed(model, torch.zeros(rows, 3, 7, 5))
    high, wide = (7 - kernel) // stride + 1, (5 - kernel) // stride + 1
    assert counts(layer) == (2 * rows * high * wide * b * (a // groups) * kernel**2,) * 3


class Attention(nn.Module):
    """`groups` heads of keys and values for `heads` of queries."""

    def __init__(self, heads, groups, wide, causal, dropout=0.0):
        super().__init__()
        self.heads, self.groups, self.wide, self.causal, self.dropout = heads, groups, wide, causal, dropout
        self.project = nn.Linear(heads * wide, (heads + 2 * groups) * wide, bias=False)

    def forward(self, x):
        every = self.project(x).unflatten(-1, (-1, self.wide)).transpose(1, 2)
        q, k, v = every.split((self.heads, self.groups, self.groups), dim=1)
        options = {"is_causal": self.causal, "dropout_p": self.dropout, "enable_gqa": self.groups != self.heads}
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


@given(rows=size, length=size, groups=st.integers(1, 3), times=st.integers(1, 2), wide=size, causal=st.booleans())
@settings(max_examples=10, deadline=None)
def test_attention(rows, length, groups, times, wide, causal):
    heads = groups * times
    model = nn.Sequential(nn.Linear(2, heads * wide), Attention(heads, groups, wide, causal))
    _, (_, layer), _ = rehearsed(model, torch.zeros(rows, length, 2))
    project = 2 * rows * length * heads * wide * (heads + 2 * groups) * wide
    product = 2 * rows * heads * length**2 * wide
    share = 2 if causal else 1
    assert counts(layer) == (project + 2 * product // share, project + 5 * product // share, project)


def test_an_embedding_is_bytes_alone():
    model = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 4))
    _, (layer, _), _ = rehearsed(model, torch.zeros(3, 5, dtype=torch.int64))
    rows, table = 3 * 5 * 16 * 4, 1000 * 16 * 4
    assert counts(layer) == (0, 0, 0)
    assert bytes_moved(layer.forward) == 2 * rows + 3 * 5 * 8  # the rows in use, not the table
    assert bytes_moved(layer.weight_grad) == rows + 3 * 5 * 8 + table + 3 * table  # made, and added to what is there


@pytest.mark.parametrize(("dtype", "spared"), [(torch.float32, 0), (torch.float64, 2 * 4 * 28 * 7)])
def test_a_recurrent_layer_counts_its_products(dtype, spared):
    """In float32 it is one operator; in float64 one for each step, the first of which has no state to go back to."""
    model = nn.Sequential(nn.Linear(3, 5), nn.LSTM(5, 7)).to(dtype)
    _, (_, layer), _ = rehearsed(model, torch.zeros(6, 4, 3, dtype=dtype))
    product = 2 * 6 * 4 * 4 * 7 * (5 + 7)
    forward, *backward = counts(layer)
    assert forward == product
    assert sum(backward) == 2 * product - spared


def test_bytes_are_what_is_read_and_written_and_views_are_free():
    x, narrow = torch.zeros(8, 4), torch.zeros(4)
    counting = Counting()
    with counting:
        x.t().reshape(4, 8)[1:].detach()
        assert bytes_moved(counting.work) == 0
        (x + narrow).relu_()
        torch.zeros(1, 4).expand(8, 4) * x  # the repeated row is read once
    assert bytes_moved(counting.work) == (128 + 16 + 128) + (128 + 128) + 16 + (16 + 128 + 128)


def test_what_a_graph_keeps():
    """What comes in is kept, and ReLU's and tanh's result; each once, and of the weights nothing."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))
    _, work, sent = rehearsed(model, torch.zeros(5, 8))
    rows = 5 * 4
    assert [one.kept for one in work] == [rows * (8 + 16), rows * (16 + 4), rows * 4]
    assert [one.kept_until_weight for one in work] == [rows * (8 + 16), rows * (16 + 4), rows * (4 + 2)]
    assert sent == (Sent(0, (1,), rows * 16), Sent(1, (2,), rows * 4))


def test_a_norm_keeps_its_input_and_what_it_found():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    _, work, _ = rehearsed(model, torch.zeros(5, 8))
    assert [one.kept for one in work] == [5 * 8 * 4, 5 * 8 * 4 + 2 * 5 * 4, 5 * 8 * 4]


def test_low_precision_keeps_casts_of_weights_and_half_of_what_layers_make():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=False))
    _, (_, layer), _ = rehearsed(model, torch.zeros(5, 8), autocast=BF16)
    assert layer.kept == 2 * (5 * 16 + 16 * 4)
    assert {one.dtype for one in layer.forward if one.flops} == {torch.bfloat16}


def test_attention_with_dropout_keeps_no_scores_where_kernels_are_fused():
    def kept(dropout):
        model = nn.Sequential(nn.Linear(2, 8), Attention(2, 2, 4, True, dropout))
        return rehearsed(model, torch.zeros(3, 64, 2))[1][1].kept

    scores = 4 * 3 * 2 * 64 * 64
    assert kept(0.1) > scores > kept(0.0)
    with fused_attention():
        assert kept(0.1) == kept(0.0)


def test_layers_that_differ_in_nothing_but_what_is_trained_are_not_the_same():
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    model[2].weight.requires_grad_(False)
    _, work, _ = rehearsed(model, torch.zeros(3, 4))
    product = 2 * 3 * 4 * 4
    assert [counts(one) for one in work] == [
        (product, 0, product), (product,) * 3, (product, product, 0), (product,) * 3,
    ]  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(ZOO) - {"mixtral"}))
def test_fakes_do_what_weights_do(name):
    """Every model of the zoo, with its weights and without: the same layers, edges, operators and bytes."""
    if ZOO[name].transformers:
        pytest.importorskip("transformers")
    model, inputs = born(name), ZOO[name].inputs(4, 6)
    assert rehearsed(model, inputs, fake=True) == rehearsed(model, inputs, fake=False)


def test_an_optimizer_that_goes_by_names_is_asked_for_each():
    """A table and a hidden matrix of one shape: AdamW keeps two states of the one, Muon one of the other."""
    model = nn.Sequential(OrderedDict(embed=nn.Linear(64, 64, bias=False), hidden=nn.Linear(64, 64, bias=False)))
    found = penstock.estimate(model, torch.zeros(2, 64), "h100", optimizer=penstock.muon(lr=0.1))
    table, matrix = (layer.optimizer_bytes for layer in found.layers)
    assert matrix == 64 * 64 * 4
    assert 2 * 64 * 64 * 4 <= table < 2 * 64 * 64 * 4 + 64
