"""Where models are cut: whole blocks, in balance, few bytes crossing, nothing lost, and clear words where not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compare import PARTS, assert_same, call, pipeline, plain, stepped
from torch import nn
from zoo import WIDTH, WORDS, ZOO, Block, Of, born, floats, score, words

from penstock import SplitError
from penstock.model.batch import as_call
from penstock.model.cuts import crossing_bytes, weights
from penstock.model.split import Split

pytestmark = pytest.mark.usefixtures("one_thread")


class GPT(nn.Module):
    def __init__(self, layers=12, width=32, vocabulary=64):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(64, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.words(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loads(split):
    path = next(iter(split.paths.values()))[0]
    load = weights(split.model, path.trace)
    return [sum(load[slice(*path.span(stage))]) for stage in range(split.pieces)]


@pytest.mark.parametrize("pieces", [2, 3, 4, 6])
def test_twelve_blocks_are_balanced_and_whole(pieces):
    split = Split(GPT(), pieces, (words(2, 32),), {})
    assert all(name.startswith("blocks.") and name.count(".") == 1 for name, _ in split.cuts)
    share = loads(split)
    assert max(share) <= 1.15 * sum(share) / pieces
    assert min(share) > 0


def test_the_head_counts():
    """A large vocabulary makes the last stage heavy; parameters alone would count its table twice."""
    split = Split(GPT(vocabulary=2048), 4, (words(2, 32),), {})
    share = loads(split)
    assert max(share) <= 1.4 * sum(share) / 4
    assert split.cuts[-1] == ("head", 0)


def test_a_cut_where_little_crosses():
    def body(m, x):
        for at in range(4):
            x = m.down[at](F.relu(m.up[at](x)))
        return x

    wide = {"up": [nn.Linear(8, 512) for _ in range(4)], "down": [nn.Linear(512, 8) for _ in range(4)]}
    model = Of(body, **{name: nn.ModuleList(layers) for name, layers in wide.items()})
    split = Split(model, 2, (torch.randn(4, 8),), {})
    path = next(iter(split.paths.values()))[0]
    assert split.cuts == [("up.2", 0)]
    assert crossing_bytes(path.trace)[path.starts[1]] == 4 * 8 * 4


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("pieces", [2, 4])
def test_no_parameter_is_lost_and_no_stage_is_empty(name, pieces):
    if ZOO[name].transformers:
        pytest.importorskip("transformers")
    model = born(name)
    args, kwargs = as_call(ZOO[name].inputs(4, 6))
    split = Split(model, pieces, args, kwargs)
    owned = [split.parameters(stage) for stage in range(pieces)]
    assert sorted(n for stage in owned for n in stage) == sorted(n for n, _ in model.named_parameters())
    assert all(load > 0 for load in loads(split))


def test_parameters_that_the_forward_does_not_use_stay_with_their_neighbours():
    model = GPT(4)
    model.blocks[2].idle = nn.Parameter(torch.zeros(3))
    model.never = nn.Linear(2, 2)
    split = Split(model, 4, (words(2, 8),), {})
    assert split.owner["blocks.2.idle"] == split.owner["blocks.2.norm2.bias"]
    assert {"never.weight", "never.bias"} <= split.owner.keys()


def test_names_are_the_models_own():
    model = GPT(4)
    split = Split(model, 2, (words(2, 8),), {})
    for stage in range(2):
        for name, parameter in split.parameters(stage).items():
            assert model.get_parameter(name) is parameter


@pytest.mark.parametrize(
    ("cuts", "said"),
    [
        (["block.1"], "did you mean blocks.1"),
        (["blocks.9"], "cuts to name submodules"),
        ([""], "cuts to name submodules"),
        (["blocks.2", "blocks.1"], "in the order of the forward"),
        (["blocks.1", "blocks.1"], "in the order of the forward"),
        (["words"], "in the order of the forward"),
        (["blocks"], "modules that the forward calls"),
        (["blocks.1", "blocks.1.linear1"], "another cut goes"),
    ],
)
def test_cuts_that_cannot_be(cuts, said):
    with pytest.raises(SplitError, match=said):
        pipeline(GPT(4), words(2, 8), cuts=cuts)


def test_a_module_that_is_never_called():
    model = GPT(4)
    model.idle = nn.Linear(2, 2)
    with pytest.raises(SplitError, match="'idle'"):
        pipeline(model, words(2, 8), cuts=["idle"])


def test_more_stages_than_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with pytest.raises(SplitError, match=r"at most 3 stages.*got 5"):
        pipeline(model, torch.randn(4, 4), stages=5)
    with pytest.raises(SplitError, match="at most 1 stage for"):
        pipeline(nn.Linear(4, 4), torch.randn(4, 4), stages=2)


def test_modules_are_opened_until_there_is_enough_to_cut():
    """Two towers in wrappers: blocks inside are found, and stay whole."""

    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x):
            return self.inner(x)

    model = Of(lambda m, x: m.right(m.left(x)), left=Tower(), right=Of(lambda m, x: m.tower(x), tower=Tower())).double()
    split = Split(model, 4, (floats(2, 3, WIDTH),), {})
    assert [name for name, _ in split.cuts] == ["left.inner.2", "right", "right.tower.inner.2"] or all(
        ".inner." in name for name, _ in split.cuts
    )


def test_a_cut_at_a_later_call_of_a_shared_block():
    model = Of(lambda m, x: m.block(m.block(m.block(m.block(x)))), block=Block()).double()
    pipe = pipeline(model, floats(4, 3, WIDTH), stages=4)
    assert pipe.split.cuts == [("block", 1), ("block", 2), ("block", 3)]
    assert_same(stepped(pipe, floats(5, 2, WIDTH) * 0 + 1), plain(model, floats(5, 2, WIDTH) * 0 + 1))


def test_planning_leaves_the_model_as_it_was():
    model = born("resnet")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    call_ = nn.Module.__call__
    apply = torch.autograd.Function.apply.__func__
    pipeline(model, floats(4, 3, 6, 6), stages=4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert nn.Module.__call__ is call_
    assert torch.autograd.Function.apply.__func__ is apply
    assert not any(isinstance(v, torch.Tensor) for m in model.modules() for v in vars(m).values())


def test_batch_norm_statistics_are_those_of_the_steps_alone():
    model = born("resnet")
    pipe = pipeline(model, floats(4, 3, 6, 6), stages=4)
    batch = floats(6, 3, 5, 5)
    reference = born("resnet")
    seen = []
    reference.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    plain_result = [call(reference, part) for part in batch.chunk(PARTS)]
    assert len(plain_result) == PARTS
    pipe.step(batch)
    together = torch.cat(seen)
    mean, variance = together.mean((0, 2, 3)), together.var((0, 2, 3))
    torch.testing.assert_close(model.norm.running_mean, 0.1 * mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.norm.running_var, 0.9 + 0.1 * variance, rtol=1e-12, atol=1e-12)


def test_ignored_tokens_with_a_sum_and_a_weight():
    model = Of(lambda m, ids: m.head(m.last(m.first(m.words(ids)))), words=nn.Embedding(WORDS, WIDTH))
    model.first, model.last, model.head = Block(), Block(), nn.Linear(WIDTH, WORDS)
    model = model.double()
    ids, target = words(6, 7), words(6, 7)
    target[0, 1:] = -100
    target[3, :5] = -100

    def counted(out, wanted):
        total = F.cross_entropy(out.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum")
        return total, (wanted != -100).sum()

    pipe = pipeline(model, words(4, 5), stages=3, loss=counted)
    found = pipe.step(ids, target).loss
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    whole = F.cross_entropy(model(ids).flatten(0, 1), target.flatten(), ignore_index=-100)
    whole.backward()
    assert_same((found, gradients), (whole.item(), {name: p.grad for name, p in model.named_parameters()}))


def test_tied_ends_stay_one_parameter_over_several_updates():
    pytest.importorskip("transformers")
    ours, theirs = born("gpt2"), born("gpt2")
    pipe = pipeline(ours, words(4, 6), stages=4, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(3):
        batch = words(6, 7)
        optimizer.zero_grad()
        loss = score(theirs(batch))
        loss.backward()
        optimizer.step()
        assert pipe.step(batch).loss == pytest.approx(loss.item(), rel=1e-12)
    assert ours.lm_head.weight is ours.transformer.wte.weight
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), parameter, rtol=1e-11, atol=1e-13)
