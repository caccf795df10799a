"""Muon and AdamW as one optimizer: each half steps as torch's own does, alone and under a pipeline without a flush."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import InputError
from penstock.training.optimizers import Muon, hidden_matrix, takes_names

torch.set_num_threads(1)
GIVEN = {"lr": 3e-3, "weight_decay": 0.02}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.one, self.norm = nn.Embedding(7, 8), nn.Linear(8, 16), nn.LayerNorm(16)
        self.two, self.head = nn.Linear(16, 12), nn.Linear(12, 7)

    def forward(self, x):
        return self.head(self.two(self.norm(self.one(self.tokens(x)).tanh())).tanh())


MATRICES = ("one.weight", "two.weight")


def batches(count, rows=6):
    draw = torch.Generator().manual_seed(5)
    return [(torch.randint(0, 7, (rows,), generator=draw), torch.randint(0, 7, (rows,), generator=draw))
            for _ in range(count)]  # fmt: skip


def torchs(net):
    """Torch's own two, over the parameters that are theirs."""
    named = dict(net.named_parameters())
    matrices = [named.pop(name) for name in MATRICES]
    return torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **GIVEN), torch.optim.AdamW(
        named.values(), **GIVEN
    )


def ours(net):
    named = dict(net.named_parameters())
    return penstock.muon(**GIVEN)(list(named), list(named.values()))


def gradients(net, x, y):
    net.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_matrices_of_hidden_layers_are_found_by_name_and_shape():
    named = dict(Net().named_parameters())
    assert tuple(name for name, p in named.items() if hidden_matrix(name, p)) == MATRICES
    known = ("transformer.wte.weight", "lm_head.weight", "embed_positions.weight")
    assert not any(hidden_matrix(name, named["one.weight"]) for name in known)


def test_each_half_steps_as_torchs_own():
    one, other = Net(), Net()
    mine, theirs = ours(one), torchs(other)
    for x, y in batches(5):
        gradients(one, x, y), gradients(other, x, y)
        mine.step()
        for optimizer in theirs:
            optimizer.step()
        assert same(one, other)


def test_a_scheduler_and_a_saved_state_serve_both_halves():
    one = Net()
    mine = ours(one)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(mine, 0.5)
    for x, y in batches(3):
        gradients(one, x, y)
        mine.step()
        scheduler.step()
    assert [group["lr"] for group in mine.param_groups] == [pytest.approx(3e-3 / 8)] * 2
    other = copy.deepcopy(one)
    again = ours(other)
    again.load_state_dict(copy.deepcopy(mine.state_dict()))
    for x, y in batches(2):
        for net, optimizer in ((one, mine), (other, again)):
            gradients(net, x, y)
            optimizer.step()
    assert same(one, other)


def test_2bw_with_muon_is_its_recursion():
    """W(t+1) = W(t) - step of the gradient at W(t-1), by torch's own optimizers."""
    net, data = Net().double(), batches(12)
    pipe = penstock.Pipeline(
        net, example=data[0][0][:2], stages=2, schedule="2bw", microbatches=2,
        loss=nn.functional.cross_entropy, optimizer=penstock.muon(**GIVEN),
    )  # fmt: skip
    plain = Net().double()
    theirs, old = torchs(plain), copy.deepcopy(plain)
    for x, y in data:
        before = copy.deepcopy(plain)
        gradients(old, x, y)
        for mine, stale in zip(plain.parameters(), old.parameters(), strict=True):
            mine.grad = stale.grad.clone()
        for optimizer in theirs:
            optimizer.step()
        old = before
    for _ in pipe.train(data):
        pass
    pipe.settle()
    for (name, a), b in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-10), name


def test_a_checkpoint_of_two_stages_goes_on_in_three(tmp_path):
    def pipeline(stages):
        return penstock.Pipeline(
            Net(), example=batches(1)[0][0][:2], stages=stages, schedule="1f1b", microbatches=2,
            loss=nn.functional.cross_entropy, optimizer=penstock.muon(**GIVEN),
        )  # fmt: skip

    first, data = pipeline(2), batches(4)
    for x, y in data[:2]:
        first.step(x, y)
    first.save(tmp_path / "saved")
    second = pipeline(3)
    second.load(tmp_path / "saved")
    for x, y in data[2:]:
        assert second.step(x, y).loss == first.step(x, y).loss
    assert same(first.model, second.model)


def test_spectrain_is_refused_with_muon():
    with pytest.raises(InputError, match=r"keeps a momentum.*Muon with one that it makes orthogonal first.*xpipe"):
        penstock.Pipeline(
            Net(), example=batches(1)[0][0], stages=2, schedule="pipedream", microbatches=1, predict="spectrain",
            loss=nn.functional.cross_entropy, optimizer=penstock.muon(**GIVEN),
        )  # fmt: skip


def test_a_stage_without_matrices_and_one_with_nothing_else():
    norm, matrix = nn.LayerNorm(4), nn.Linear(4, 4, bias=False)
    for module, kinds in ((norm, [False]), (matrix, [True])):
        made = penstock.muon(lr=0.1)(*map(list, zip(*module.named_parameters(), strict=True)))
        assert [group["muon"] for group in made.param_groups] == kinds
        assert isinstance(made, Muon)


def test_it_is_an_optimizer_like_any_other():
    """A closure, a copy, names in pairs; what it cannot do is refused."""
    one, (x, y) = Net(), batches(1)[0]
    mine = Muon(one.named_parameters(), **GIVEN)
    assert [group["muon"] for group in mine.param_groups] == [True, False]

    def closure():
        gradients(one, x, y)
        return 3.5

    assert mine.step(closure) == 3.5
    other, copied = copy.deepcopy((one, mine))
    for net, optimizer in ((one, mine), (other, copied)):
        gradients(net, x, y)
        optimizer.step()
    assert same(one, other)
    assert not same(one, Net())
    with pytest.raises(ValueError, match="but got groups"):
        Muon([{"params": list(one.parameters())}])
    with pytest.raises(ValueError, match="give all parameters when it is made"):
        mine.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})


def test_a_config_may_name_it():
    assert takes_names("muon")
    assert not takes_names("nesterov")
    assert not takes_names("AdamW")
