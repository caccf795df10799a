"""What a newcomer gets wrong is answered by one message that says what to do instead."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock import InputError, Pipeline, SplitError

torch.set_num_threads(1)
X = torch.ones(4, 6)


def layers(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(count)))


def wrapped(name: str, inner: nn.Module) -> nn.Module:
    """A wrapper of torch's around a model, without the processes that it would want."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    if name == "DataParallel":
        return nn.DataParallel(inner)
    if name == "FSDPModule":
        inner.__class__ = type("FSDPSequential", (FSDPModule, nn.Sequential), {})  # as fully_shard does
        return inner
    kind = {"FSDP": FullyShardedDataParallel, "DDP": DistributedDataParallel}[name]
    outer = kind.__new__(kind)
    nn.Module.__init__(outer)
    outer._modules["_fsdp_wrapped_module" if name == "FSDP" else "module"] = inner
    return outer


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("DDP", "bare model.* but got DistributedDataParallel around the model; give what it wraps, its .module"),
        ("DataParallel", "bare model.* but got DataParallel around the model; give what it wraps"),
        ("FSDP", "bare model.* but got FullyShardedDataParallel around the model; give what it wraps"),
        ("FSDPModule", "bare model.* but got the model after fully_shard; give it as it was before"),
    ],
)
def test_a_model_that_another_wrapper_has_spread_already(name, words):
    with pytest.raises(InputError, match=words):
        Pipeline(wrapped(name, layers()), example=X[:1], stages=2)
    if name != "FSDPModule":
        with pytest.raises(InputError, match=words.split()[0]):
            Pipeline([layers(1), wrapped(name, layers(1))], example=X[:1])
        with pytest.raises(InputError, match=r"around the model's '1'"):
            Pipeline(nn.Sequential(layers(), wrapped(name, layers())), example=X[:1], stages=2)


def test_a_compiled_model_is_given_bare_and_its_blocks_compiled():
    with pytest.raises(SplitError, match="Sequential compiled as a whole; compile its blocks instead"):
        Pipeline(torch.compile(layers(), backend="eager"), example=X[:1], stages=2)


@pytest.mark.parametrize("loss", [F.mse_loss, F.cross_entropy, lambda out, target: (out - target).square().mean()])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_loss_that_wants_a_target_and_gets_none(loss, schedule):
    pipe = Pipeline(
        layers(), example=X[:1], stages=2, schedule=schedule, loss=loss, verify=False,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )  # fmt: skip
    words = (
        r"expected a target that the loss takes, but got None, which it answers with .*NoneType.*pipe.step\(inputs, t"
    )
    for run in (lambda: pipe.step(X), lambda: list(pipe.train([(X, None)])), lambda: pipe.evaluate([(X, None)])):
        with pytest.raises(InputError, match=words) as caught:
            run()
        assert caught.value.__cause__ is not None  # the user's own line


@pytest.mark.parametrize("loss", [lambda out: out.sum(), lambda out, target, weight: out.sum(), lambda: 0.0])
def test_a_loss_of_other_arguments(loss):
    """It was a TypeError that counts arguments, and does not say which ones there are."""
    pipe = Pipeline(layers(), example=X[:1], stages=2, loss=loss, verify=False)
    words = r"two arguments, result and target, but got .*positional argument.*; write loss\(result, target\)"
    for run in (lambda: pipe.step(X), lambda: pipe.evaluate([(X, X)])):
        with pytest.raises(InputError, match=words):
            run()


def test_an_error_of_the_loss_that_has_nothing_to_do_with_the_target_is_its_own():
    def loss(out, target):
        raise ZeroDivisionError("no such luck")

    pipe = Pipeline(layers(), example=X[:1], stages=2, loss=loss, verify=False)
    with pytest.raises(ZeroDivisionError, match="no such luck"):
        pipe.step(X)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((X, X), r"Sequential.forward takes, but got \(Tensor, Tensor\): too many.*pipe.step\(inputs, target\)"),
        ({"x": X}, r"Sequential.forward takes, but got \(x=\): missing a required argument: 'input'"),
        ((), r"at least one tensor that has rows"),
    ],
)
def test_inputs_that_the_forward_does_not_take(inputs, words):
    pipe = Pipeline(layers(), example=X[:1], stages=2, loss=lambda out, target: out.sum())
    with pytest.raises(InputError, match=words):
        pipe.step(inputs)
    if inputs:
        with pytest.raises(InputError, match=words):
            Pipeline(layers(), example=inputs, stages=2)


def test_a_type_error_inside_the_model_is_the_users_own():
    class Broken(nn.Linear):
        def forward(self, x):
            return super().forward(x) + "text"

    with pytest.raises(TypeError, match=r"unsupported operand|must be") as caught:
        Pipeline(nn.Sequential(nn.Linear(6, 6), Broken(6, 6)), example=X[:1], stages=2)
    assert not isinstance(caught.value, InputError)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = layers(2), nn.Linear(6, 6)

    def forward(self, x):
        return self.head(self.block(self.block(x)))


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6))

    def forward(self, x):
        return x @ self.weight


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers(3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = -x if x.sum() > 1e9 else x
        return x


def watched() -> nn.Module:
    model = nn.Sequential(layers(2), nn.Linear(6, 6))
    model[0].register_forward_hook(lambda module, given, made: None)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Recurrent, r"at most 2 stages .* got 9: 'lstm' \(LSTM, \d+% of the operations\) has no submodules, 'head'"),
        (Twice, r"at most 3 stages .* got 9: 'block' \(Sequential, .*\) is called 2 times, 'head'"),
        (Flat, r"at most 1 stage for .* got 9: the forward calls no submodules"),
        (
            watched,
            r"at most 2 stages .* got 9: '0' \(Sequential, .*\) has a hook of its own \(watched.<locals>.<lambda>\)",
        ),
        (
            Deciding,
            r"at most 1 stage .* got 9: .* and nowhere across __bool__\(\) at .*test_messages.py:\d+ of a value",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_too_many_stages_names_what_stays_whole(make, words):
    with pytest.raises(SplitError, match=words):
        Pipeline(make(), example=torch.ones(1, 6), stages=9)


class Contrastive(nn.Module):
    """Two towers; each row's picture is to be told from those of all rows beside it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.words, self.pictures = layers(2).double(), layers(2).double()

    def forward(self, words, pictures):
        scores = self.words(words) @ self.pictures(pictures).T
        return F.cross_entropy(scores, torch.arange(len(words)))


def test_a_contrastive_loss_inside_forward_is_told_what_it_needs():
    given = tuple(torch.randn(8, 6, dtype=torch.float64) for _ in range(2))
    options = {"example": tuple(part[:4] for part in given), "stages": 2, "loss": lambda out, target: out}
    words = r"inside forward is taken outside for that, in loss=; .* contrastive loss .*: give microbatches=1"
    with pytest.warns(UserWarning, match=words):
        Pipeline(Contrastive(), microbatches=4, **options).step(given)
    pipe, plain = Pipeline(Contrastive(), microbatches=1, **options), Contrastive()
    loss = plain(*given)
    loss.backward()
    assert pipe.step(given).loss == pytest.approx(loss.item(), rel=1e-12)
    for mine, wanted in zip(pipe.model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, wanted.grad, rtol=0, atol=1e-12)
