"""What a user changes between two steps is followed: flags, numbers, what needs a gradient."""

from __future__ import annotations

import functools

import pytest
import torch
from compare import assert_same, pipeline, plain, stepped
from zoo import WIDTH, Block, Of, blocks, floats

from penstock import SplitError

CUTS = ["blocks.1", "blocks.2", "blocks.3"]


pytestmark = pytest.mark.usefixtures("one_thread")


def row(rows=4, length=6):
    return floats(rows, length, WIDTH)


def through(m, x):
    for block in m.blocks:
        x = block(x)
    return x


def stack(body=through, **parts):
    return Of(body, blocks=blocks(4), **parts).double()


def test_a_complex_tensor_that_crosses_a_cut_keeps_its_gradient():
    def body(m, x):
        x = torch.fft.rfft(m.blocks[0](x))
        return m.blocks[2](torch.fft.irfft(m.turn(x), n=WIDTH))

    model = stack(body, turn=Of(lambda m, x: x * 1j))
    batch = row(5, 7)
    assert_same(stepped(pipeline(model, row(), cuts=["turn", "blocks.2"]), batch), plain(model, batch))


class Warm(Block):
    warm = True

    def forward(self, x):
        x = super().forward(x)
        return x.detach() if self.warm else x


def open_switch(m, x):
    with torch.set_grad_enabled(m.free):
        x = m.blocks[1](m.blocks[0](x))
    return m.blocks[3](m.blocks[2](x))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("where", ["in open code", "on a config", "inside a block"])
def test_what_needs_a_gradient_follows_the_users_flag(where, first, recompute):
    class Config:
        free = first

    model, config = stack(open_switch), Config()
    config.free = first
    if where == "inside a block":
        model.body, model.blocks[0] = through, Warm().double()
    elif where == "on a config":
        model.config, model.free = config, first
        model.body = lambda m, x: open_switch(Of(open_switch, blocks=m.blocks, free=m.config.free), x)
    else:
        model.free = first

    def flip(free):
        model.free = config.free = free
        model.blocks[0].warm = not free

    flip(first)
    pipe = pipeline(model, row(), cuts=CUTS, recompute=recompute)
    for free in (first, not first, first, not first):
        flip(free)
        batch = row(5, 7)
        assert_same(stepped(pipe, batch), plain(model, batch))


@pytest.mark.parametrize("where", ["module", "config"])
def test_a_flag_changed_between_steps_takes_another_path(where):
    class Config:
        aux = False

    def body(m, x):
        holder = m if where == "module" else m.config
        x = m.blocks[1](m.blocks[0](x))
        if holder.aux:
            x = x * 2
        return m.blocks[3](m.blocks[2](x))

    model = stack(body)
    model.config, model.aux = Config(), False
    pipe = pipeline(model, row(), cuts=CUTS)
    for aux in (False, True, False, True):
        model.aux = model.config.aux = aux
        batch = row(5, 7)
        assert_same(stepped(pipe, batch), plain(model, batch))
        with torch.no_grad():
            torch.testing.assert_close(pipe.forward(batch), model(batch))


def test_a_number_changed_each_step_is_not_traced_each_step():
    def body(m, x):
        x = m.blocks[0](x)
        x = x.view(x.shape[0], -1, WIDTH) * m.factor  # asks for a shape
        return m.blocks[3](m.blocks[2](m.blocks[1](x))) if m.depth > 3 else m.blocks[2](m.blocks[1](x))

    model = stack(body)
    model.factor, model.depth = 1.0, 0
    pipe = pipeline(model, row(), cuts=["blocks.1", "blocks.2"])
    for step in range(8):
        model.factor, model.depth = step / 7, step
        batch = row(5, 7)
        assert_same(stepped(pipe, batch), plain(model, batch))
    assert sum(map(len, pipe.split.paths.values())) <= 4  # deep or not, with gradients or without


def test_a_decision_that_nothing_shows_is_traced_again():
    switch = {"on": False}

    def body(m, x):
        x = m.blocks[1](m.blocks[0](x))
        x = x.tanh() if switch["on"] else x
        return m.blocks[3](m.blocks[2](x))

    model = stack(body)
    pipe = pipeline(model, row(), cuts=CUTS)
    for on in (False, True, False):
        switch["on"] = on
        batch = row(5, 7)
        assert_same(stepped(pipe, batch), plain(model, batch))


def test_a_path_that_changes_on_every_forward_is_refused():
    turn = iter(range(10**6))

    def body(m, x):
        x = through(m, x)
        return x.tanh() if next(turn) % 2 else x

    pipe = pipeline(stack(body), row(), cuts=["blocks.2"], verify=False)
    with pytest.raises(SplitError, match="path"):
        list(pipe.train([(row(), None)] * 9))


# caches


MASKS = {}


@functools.lru_cache
def mask(length, dtype):
    return torch.ones(length, length, dtype=dtype).triu(1)


def by_lru_cache(m, x):
    for block in m.blocks:
        x = block(x) + mask(x.shape[1], x.dtype)[:, :1]
    return x


def by_dict(m, x):
    for block in m.blocks:
        if x.shape[1] not in MASKS:
            MASKS[x.shape[1]] = torch.arange(x.shape[1]).to(torch.float64)
        x = block(x) * MASKS[x.shape[1]][:, None].cos()
    return x


def by_inputs(m, x):
    """The cache depends on the input's own shape: nothing else is asked."""
    table = mask(x.shape[1], torch.float64)[0, :, None]
    for block in m.blocks:
        x = block(x) + table
    return x


@pytest.mark.parametrize("body", [by_lru_cache, by_dict, by_inputs])
def test_caches_in_open_code(body):
    MASKS.clear()
    mask.cache_clear()
    model = stack(body)
    pipe = pipeline(model, row(4, 6), cuts=CUTS)
    for length in (6, 7, 6, 9, 7):
        batch = row(5, length)
        wanted = plain(model, batch)
        if length == 9:  # a cache may be cleared, or may have lost an entry
            MASKS.clear()
            mask.cache_clear()
        assert_same(stepped(pipe, batch), wanted)


def test_a_path_known_with_a_warm_cache_is_walked_with_a_cold_one():
    """As on a rank that has no weights to trace with."""
    MASKS.clear()
    mask.cache_clear()
    model = stack(by_inputs)
    pipe = pipeline(model, row(4, 6), cuts=CUTS)
    pipe.step(row(5, 6))
    pipe.split.whole = False
    batch = row(5, 8)
    mask.cache_clear()
    found = stepped(pipe, batch)
    assert_same(found, plain(model, batch))


def test_an_extra_draw_is_another_path():
    def body(m, x):
        x = m.blocks[1](m.blocks[0](x))
        if switch["on"]:
            x = x * torch.rand(1, dtype=torch.float64)
        return m.blocks[3](m.blocks[2](x))

    switch = {"on": False}
    pipe = pipeline(stack(body), row(), cuts=CUTS)
    pipe.split.whole = False  # as on a rank that cannot trace again
    pipe.step(row())
    switch["on"] = True
    with pytest.raises(SplitError, match=r"torch\.rand"):
        pipe.step(row())


def test_a_switch_that_changes_an_input_is_another_path():
    def body(m, x):
        return through(m, x * 2 if switch["on"] else x)

    switch = {"on": False}
    model = stack(body)
    pipe = pipeline(model, row(), cuts=CUTS)
    for on in (False, True, False):
        switch["on"] = on
        batch = row(5, 7)
        assert_same(stepped(pipe, batch), plain(model, batch))
