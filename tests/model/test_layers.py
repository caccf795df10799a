"""A model's layers: every parameter in one of them, each a place where a pipeline can be cut, skips as edges."""

from __future__ import annotations

import pytest
import torch
from compare import pipeline
from torch import nn
from zoo import WIDTH, ZOO, Block, Of, born, floats

from penstock.model.batch import as_call
from penstock.model.layers import layers_of
from penstock.model.materialise import weightless

BLOCKS = {
    "sequential": 7, "resnet": 5, "unet": 7, "lstm": 4, "many inputs": 6, "dicts": 6, "dataclass": 7, "named tuple": 7,
    "tuple": 7, "used twice": 4, "tied": 8, "glue": 7, "frozen": 7, "loss inside": 7, "gpt2": 8, "bert": 8, "llama": 8,
    "mixtral": 8, "t5": 9, "vit": 8,
}  # fmt: skip


def found(name, rows=4, length=6):
    model = born(name)
    return layers_of(model, *as_call(ZOO[name].inputs(rows, length)))


@pytest.mark.parametrize("name", ZOO)
def test_blocks_embeddings_and_heads_are_layers_and_no_parameter_is_lost(name):
    layers = found(name)
    assert len(layers) >= BLOCKS[name]
    every = [parameter for layer in layers for parameter in layer.parameters]
    assert sorted(every) == sorted(name for name, _ in layers.split.model.named_parameters())
    buffers = [buffer for layer in layers for buffer in layer.buffers]
    assert sorted(buffers) == sorted(name for name, _ in layers.split.model.named_buffers())
    events = len(layers.split.first.trace.events)
    assert [*[layer.span[0] for layer in layers][1:], events] == [layer.span[1] for layer in layers]


@pytest.mark.parametrize("name", ZOO)
def test_each_layer_begins_where_a_pipeline_can_be_cut(name):
    layers = found(name)
    for at, layer in enumerate(list(layers)[1:], 1):
        model = born(name)
        pipe = pipeline(model, ZOO[name].inputs(4, 6), cuts=[layer.name], verify=False, schedule="gpipe")
        assert set(pipe.split.parameters(0)) == {name for layer in layers.layers[:at] for name in layer.parameters}


@pytest.mark.parametrize("name", ZOO)
def test_another_look_with_other_sizes_finds_the_same(name):
    first, second = found(name), found(name, rows=7, length=9)
    assert first.names == second.names
    assert [layer.parameters for layer in first] == [layer.parameters for layer in second]
    assert first.edges.keys() == second.edges.keys()


def test_skips_of_a_u_net_are_edges():
    layers = found("unet", rows=2, length=8)
    names = {name: at for at, name in enumerate(layers.names)}
    size = 8 * 2  # of a number, rows
    assert layers.edges[names["down.0"], names["up.1"]] == size * 4 * 8 * 8
    assert layers.edges[names["down.1"], names["up.2"]] == size * 6 * 4 * 4
    assert layers.edges[names["down.0"], names["down.1"]] == size * 4 * 4 * 4
    assert sum(one.bytes for one in layers.sent if one.source == names["down.0"]) == size * 4 * (8 * 8 + 4 * 4)


def test_a_tied_weight_is_with_the_first_layer_that_uses_it():
    owners = {name: layer.name for layer in found("tied") for name in layer.parameters}
    assert owners["words.weight"] == "words"
    assert owners["blocks.1.down.weight"] == "blocks.1"
    assert "head.weight" not in owners


def test_a_model_without_weights_has_the_same_layers():
    with weightless():
        bare = Of(
            lambda m, x: m.head(m.body_(x)), body_=nn.Sequential(*(Block() for _ in range(3))), head=nn.Linear(8, 2)
        )
    layers = layers_of(bare, (torch.randn(4, WIDTH),), {})
    assert layers.names == ("body_.0", "body_.1", "body_.2", "head")
    assert set(layers.edges.values()) == {4 * WIDTH * 4}
    assert all(parameter.is_meta for parameter in bare.parameters())


def test_what_cannot_be_cut_is_one_layer():
    assert layers_of(nn.Linear(3, 3), (torch.randn(2, 3),), {}).names == ("Linear",)
    hooked = born("tuple")
    hooked.register_forward_hook(lambda *_: None)
    layers = layers_of(hooked, (floats(4, WIDTH),), {})
    assert layers.names == ("Of",)
    assert "hooks of their own" in str(layers.whole)
    assert len(layers[0].parameters) == len(list(hooked.parameters()))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        return x + sum(shares[:, at, None] * expert(x) for at, expert in enumerate(self.experts))


class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(Expert(), Expert())

    def forward(self, x):
        return x + self.layer(x)


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.parts = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("kind", [Mixture, Bottleneck, Expert])
def test_blocks_stay_whole_and_stacks_of_them_do_not(kind):
    model = nn.Sequential(Stack(kind), Stack(kind), nn.Dropout(), nn.Linear(WIDTH, 2))
    layers = layers_of(model, (torch.randn(4, WIDTH),), {})
    assert layers.names == ("0.parts.0", "0.parts.1", "1.parts.0", "1.parts.1", "3")
    assert layers.cuts((2, 4)) == ["1.parts.0", "3"]


class Doubter(Stack):
    """Its own code looks at data: opened, it would forbid all cuts behind it."""

    def forward(self, x):
        for part in self.parts:
            x = part(x) if x.sum() > -1e9 else x
        return x


class Keeper(Stack):
    """Its own code keeps a count, which it may not do once for each stage: it cannot be opened at all."""

    def forward(self, x):
        self.count = getattr(self, "count", 0) + 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [Doubter, Keeper])
def test_what_must_not_be_opened_stays_whole_and_the_rest_does_not(kind):
    model = nn.Sequential(Stack(Expert), nn.Sequential(kind(Expert), nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 2))
    layers = layers_of(model, (torch.randn(4, WIDTH),), {})
    assert layers.names == ("0.parts.0", "0.parts.1", "1.0", "1.1", "2")
    assert "count" not in vars(model[1][0])
