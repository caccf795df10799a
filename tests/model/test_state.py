"""What modules keep between forwards: a trace leaves it alone, a failed step too, and recompute changes it once."""

from __future__ import annotations

import collections
import random

import numpy as np
import pytest
import torch
from compare import assert_same, pipeline, stepped
from torch import nn
from zoo import WIDTH, Block, Of, floats

from penstock import InputError
from penstock.model.buffers import Buffers

CUTS = ["blocks.1", "blocks.2", "blocks.3"]


pytestmark = pytest.mark.usefixtures("one_thread")


class Config:
    def __init__(self):
        self.calls, self.log = 0, []


class Remembers(Block):
    """Changes everything it keeps, in every way, and lets it show in the result."""

    def __init__(self):
        super().__init__()
        self.calls, self.bank, self.queue = 0, [], collections.deque(maxlen=3)
        self.named, self.met, self.config = {"deep": [0]}, set(), Config()
        self.average, self.table = torch.zeros(WIDTH, 2, dtype=torch.float64), np.zeros(3)

    def forward(self, x):
        self.calls += 1
        self.bank.append(float(x.detach().mean()))
        self.queue.append(self.calls)
        self.named["deep"][0] += 1
        self.named[self.calls] = "more"
        self.met.add(self.calls)
        self.config.calls += 1
        self.config.log.append(self.calls)
        self.average.mul_(0.5).add_(x.detach().mean())
        self.table[0] += 1
        factor = self.calls + sum(self.queue) + len(self.named) + len(self.met) + self.config.calls + self.table[0]
        return super().forward(x) * factor + self.average.detach().clone().sum()


def all_of(model):
    plain = [
        (b.calls, [*b.bank], [*b.queue], {**b.named}, [*b.named["deep"]], {*b.met}, b.config.calls, [*b.config.log])
        for b in model.blocks
    ]
    return plain, [(b.average.tolist(), b.table.tolist()) for b in model.blocks]


def stack(block=Remembers):
    torch.manual_seed(3)

    def through(m, x):
        for one in m.blocks:
            x = one(x)
        return x

    return Of(through, blocks=nn.ModuleList(block() for _ in range(4))).double()


def row(rows=4, length=6):
    return floats(rows, length, WIDTH)


def test_a_trace_and_a_check_leave_what_blocks_keep_alone():
    model = stack()
    model.blocks[1].calls, model.blocks[1].bank = 7, [1.0]
    before, average = all_of(model), model.blocks[0].average
    pipe = pipeline(model, row(), cuts=CUTS)
    assert all_of(model) == before
    assert model.blocks[0].average is average
    pipe.split.path((row(2, 3),), {})
    assert all_of(model) == before


@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
def test_what_blocks_keep_changes_once_a_micro_batch_also_with_recompute(recompute):
    ours, theirs, batches = stack(), stack(), [row(6, 5) for _ in range(3)]
    pipe = pipeline(ours, row(), cuts=CUTS, recompute=recompute)
    plain = pipeline(theirs, row(), cuts=CUTS, verify=False)
    for batch in batches:
        assert_same(stepped(pipe, batch), stepped(plain, batch))
        assert all_of(ours) == all_of(theirs)
    assert ours.blocks[0].calls == 3 * 3


def test_a_step_that_fails_leaves_what_blocks_keep_alone():
    model = stack()
    pipe = pipeline(model, row(), cuts=CUTS)
    for _ in range(2):
        before = all_of(model)
        with pytest.raises(InputError, match="finite"):
            pipe.step(row(6, 5) * float("nan"))
        assert all_of(model) == before
        pipe.step(row(6, 5))


class Late(Block):
    """A buffer that only begins to change when it is told to."""

    def __init__(self):
        super().__init__()
        self.late = False
        self.register_buffer("seen", torch.ones(2, 2, dtype=torch.float64))

    def forward(self, x):
        if self.late:
            self.seen += 1
        return super().forward(x) * self.seen.detach().clone().sum()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_buffer_that_begins_to_change_later(recompute):
    model = stack(Late)
    pipe = pipeline(model, row(), cuts=CUTS, recompute=recompute)
    plain = pipeline(stack(Late), row(), cuts=CUTS)
    for late in (False, True, True):
        for block in (*model.blocks, *plain.model.blocks):
            block.late = late
        before = [block.seen.clone() for block in model.blocks]
        with pytest.raises(InputError, match="finite"):
            pipe.step(row() * float("nan"))
        assert all(map(torch.equal, before, (block.seen for block in model.blocks)))
        batch = row(6, 5)
        assert_same(stepped(pipe, batch), stepped(plain, batch))
        assert [float(block.seen[0, 0]) for block in model.blocks] == [
            float(block.seen[0, 0]) for block in plain.model.blocks
        ]
    assert float(model.blocks[0].seen[0, 0]) == 1 + 2 * 3


def test_copies_of_large_buffers_that_rest_are_not_kept(monkeypatch):
    monkeypatch.setattr("penstock.model.state.LARGE", 8)
    model = stack(Late)
    buffers = Buffers(model)
    before = buffers.save()
    model.blocks[0].seen += 1
    buffers.learn(before)
    kept = [copy.values is not None for copy in buffers.save().tensors]
    assert kept == [True, False, False, False]
    before = buffers.save()
    model.blocks[1].seen += 1
    with pytest.warns(UserWarning, match="could not be put back"):
        buffers.restore(before)
    assert float(model.blocks[0].seen[0, 0]) == 2


class Draws(Block):
    def __init__(self):
        super().__init__()
        self.torchs, self.pythons = torch.Generator().manual_seed(1), random.Random(2)
        self.numpys, self.olds = np.random.default_rng(3), np.random.RandomState(4)

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.torchs, dtype=x.dtype, device="cpu").to(x.device)
        factor = self.pythons.random() + self.numpys.random() + self.olds.rand()
        return super().forward(x * noise) * factor

    def ahead(self):
        return (
            self.torchs.get_state().tolist(),
            self.pythons.getstate(),
            self.numpys.bit_generator.state,
            self.olds.get_state()[2],
        )


def test_generators_inside_blocks_are_rewound():
    model = stack(Draws)
    before = [block.ahead() for block in model.blocks]
    pipe = pipeline(model, row(), cuts=CUTS, recompute="always")
    assert [block.ahead() for block in model.blocks] == before
    plain = pipeline(stack(Draws), row(), cuts=CUTS)
    for _ in range(2):
        batch = row(6, 5)
        assert_same(stepped(pipe, batch), stepped(plain, batch))
        assert [b.ahead() for b in model.blocks] == [b.ahead() for b in plain.model.blocks]


def test_a_generator_that_no_module_holds_is_rewound():
    def made(source):
        class Noisy(Block):
            def forward(self, x):
                noise = torch.rand(x.shape, generator=source, dtype=x.dtype, device="cpu").to(x.device)
                return super().forward(x * noise)

        return stack(Noisy)

    ours, theirs = (torch.Generator().manual_seed(1) for _ in range(2))
    pipe = pipeline(made(ours), row(), cuts=CUTS, recompute="always", verify=False)
    plain = pipeline(made(theirs), row(), cuts=CUTS, verify=False)
    assert torch.equal(ours.get_state(), torch.Generator().manual_seed(1).get_state())
    for _ in range(2):
        batch = row(6, 5)
        assert_same(stepped(pipe, batch), stepped(plain, batch))
        assert torch.equal(ours.get_state(), theirs.get_state())
