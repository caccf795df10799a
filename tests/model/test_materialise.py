"""Big models: built without weights, split, and materialised stage by stage."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from penstock.errors import SplitError
from penstock.model.materialise import is_weightless, materialise, weightless
from penstock.model.passage import Passage
from penstock.model.split import Split


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.full((width,), 0.5), persistent=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x * self.scale)))


class Net(nn.Module):
    def __init__(self, width=8, depth=4):
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(12).reshape(3, 4)


def split_weightless(model, pieces):
    return Split(model, pieces, (TOKENS,), {})


def test_a_weightless_model_has_buffers_and_no_weights():
    with weightless():
        model = Net()
    assert is_weightless(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.blocks[0].scale.tolist() == [0.5] * 8
    assert model.head.weight is model.embedding.weight
    assert not is_weightless(Net())  # outside, models are built as ever


def test_stages_are_found_and_each_materialises_only_its_own():
    whole = Net()
    with weightless():
        model = Net()
    split = split_weightless(model, 3)
    path = next(iter(split.paths.values()))[0]
    state = whole.state_dict()
    values, passage, result = {}, Passage(), None
    for stage in range(3):
        used = split.uses(stage)
        with weightless():
            fresh = Net()
        mine = split_weightless(fresh, 3)
        materialise(fresh, used, load=state.__getitem__)
        real = {name for name, p in fresh.named_parameters(remove_duplicate=False) if not p.is_meta}
        tied = {"head.weight", "embedding.weight"}
        assert real == used | (tied if used & tied else set())
        received = {v: values[v] for v in path.incoming[stage]}
        made, result = mine.run(next(iter(mine.paths.values()))[0], stage, received, passage, (TOKENS,), {})
        values.update(made)
    assert torch.equal(result, whole(TOKENS))


def test_layers_initialise_themselves_without_a_state():
    with weightless():
        model = Net()
    torch.manual_seed(0)
    materialise(model, ["blocks.1.up.weight", "blocks.1.up.bias"])
    torch.manual_seed(0)
    assert torch.equal(model.blocks[1].up.weight, nn.Linear(8, 16).weight)
    assert model.blocks[0].up.weight.is_meta


def test_what_cannot_initialise_itself_is_refused_by_name():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.bare = nn.Parameter(torch.zeros(3))

    with weightless():
        model = nn.Sequential(Odd())
    with pytest.raises(SplitError, match=r"0 to have reset_parameters\(\).*Odd without.*give load="):
        materialise(model, ["0.bare"])


def test_a_model_that_does_not_fit_twice_is_split_and_materialised_stage_by_stage():
    """A gibibyte of weights where 1.5 may be taken on top of torch itself: one stage fits, the model twice does not."""
    code = """
        import resource
        import torch
        from torch import nn
        from penstock.model.materialise import materialise, weightless
        from penstock.model.split import Split

        torch.set_num_threads(1)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + int(1.5 * 2**30),) * 2)
        try:
            [torch.empty(2**28) for _ in range(2)]
        except RuntimeError:
            pass
        else:
            raise SystemExit("the limit does not hold")
        width = 4096
        with weightless():
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(16)))  # 16 x 64 MiB
        split = Split(model, 4, (torch.zeros(2, width),), {})
        materialise(model, split.uses(2), load=lambda name: torch.zeros(width, width))
        held = sum(p.numel() * 4 for p in model.parameters() if not p.is_meta)
        assert held == 4 * 64 * 2**20, held
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
