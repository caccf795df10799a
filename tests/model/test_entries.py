"""How calls come to a walk: by entries on modules, which are gone afterwards, or by all modules where it must be."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from compare import assert_same, pipeline, plain, stepped
from torch import nn
from zoo import WIDTH, Block, Of, blocks, floats, score

ENTRY = "_compiled_call_impl"


pytestmark = pytest.mark.usefixtures("one_thread")


def through(m, x):
    for block in m.blocks:
        x = block(x)
    return x


def batch():
    return floats(6, 5, WIDTH)


def stack(body=through, **parts):
    return Of(body, blocks=blocks(4), **parts).double()


def entries(model):
    return [name for name, module in model.named_modules() if ENTRY in vars(module)]


def test_a_step_runs_torchs_own_calls_and_leaves_no_entry():
    met = []

    class Curious(Block):
        def forward(self, x):
            met.append((nn.Module.__call__, ENTRY in vars(self), [ENTRY in vars(inner) for inner in self.children()]))
            return super().forward(x)

    own, model = nn.Module.__call__, stack()
    model.blocks[1] = Curious().double()
    pipe = pipeline(model, batch(), cuts=["blocks.2"])
    stepped(pipe, batch())  # the first compares itself with the whole model
    met.clear()
    before = {name: list(vars(module)) for name, module in model.named_modules()}
    stepped(pipe, batch())
    assert met
    assert all(call is own and entry and not any(inner) for call, entry, inner in met)
    assert {name: list(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("where", ["forward", "loss"])
def test_a_step_that_fails_leaves_no_entry(where):
    fails = []

    class Failing(Block):
        def forward(self, x):
            if fails and where == "forward":
                raise RuntimeError("here")
            return super().forward(x)

    def loss(result, target):
        if fails and where == "loss":
            raise RuntimeError("here")
        return score(result, target)

    model = stack()
    model.blocks[3] = Failing().double()
    pipe = pipeline(model, batch(), cuts=["blocks.2"], loss=loss)
    x = batch()
    wanted = plain(model, x)
    fails.append(1)
    with pytest.raises(RuntimeError, match="here"):
        pipe.step(x)
    assert not entries(model)
    fails.clear()
    assert_same(stepped(pipe, x), wanted)


def test_a_module_that_is_not_the_models_is_met_too():

    def body(m, x):
        x = m.blocks[1](m.blocks[0](x))
        return m.blocks[3](m.blocks[2](nn.Tanh()(x)))

    model = stack(body)
    pipe = pipeline(model, batch(), cuts=["blocks.1", "blocks.2"])
    own = nn.Module.__call__
    for _ in range(2):
        x = batch()
        assert_same(stepped(pipe, x), plain(model, x))
    assert nn.Module.__call__ is own


def test_two_pipelines_of_one_model_and_a_copy_of_it():
    model, copies = stack(), []

    class Copying(Block):
        def forward(self, x):
            copies.append(copy.deepcopy(self))
            return super().forward(x)

    model.blocks[0] = Copying().double()
    pipes = [pipeline(model, batch(), cuts=[f"blocks.{at}"]) for at in (1, 3)]
    for pipe in pipes:
        x = batch()
        assert_same(stepped(pipe, x), plain(model, x))
    assert copies
    assert not any(map(entries, copies))


class Compiled(Block):
    """A block with a compiled call, as `block.compile()` leaves it."""

    def __init__(self):
        super().__init__()
        self.calls = []
        setattr(self, ENTRY, self.compiled)

    def compiled(self, x):
        self.calls.append(1)
        return self._call_impl(x)


def test_a_compiled_block_runs_compiled_and_stays_so():
    model = stack()
    block = model.blocks[2] = Compiled().double()
    pipe = pipeline(model, batch(), cuts=["blocks.1"], verify=False)
    block.calls.clear()
    x = batch()
    found = stepped(pipe, x)
    assert len(block.calls) == pipe.microbatches
    assert vars(block)[ENTRY] == block.compiled
    assert_same(found, plain(model, x))


def test_a_step_leaves_nothing_for_the_garbage_collector():
    met = []

    def loss(result, target):
        met.append(weakref.ref(target))
        return nn.functional.cross_entropy(result.flatten(0, 1), target.flatten())

    pipe = pipeline(stack(), batch(), cuts=["blocks.2"], loss=loss)
    x, target = batch(), torch.randint(0, WIDTH, (6, 5))
    for _ in range(4):  # in which the loss is looked at
        pipe.step(x, target)
    met.clear()
    gc.collect()
    gc.disable()
    try:
        pipe.step(x, target)
        first = met[:]
        pipe.step(x, target)
        assert first
        assert [ref() for ref in first] == [None] * len(first)
    finally:
        gc.enable()
