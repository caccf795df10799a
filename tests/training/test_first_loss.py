"""The first step warns when a mean hides its weights, and only then."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plain
from penstock import Pipeline
from penstock.errors import InputError

torch.set_num_threads(1)


def first_step(model: nn.Module, loss, x, y, **options) -> list[str]:
    """The warnings of a first step."""
    pipe = Pipeline(model, example=x[:2], stages=2, microbatches=4, loss=loss, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(x, y)
        pipe.step(x, y)
    return [str(one.message) for one in caught]


def some_ignored(rows: int = 8):
    x, y = plain.with_ignored(rows)
    y[:, 0] = 1  # no micro-batch without any: its mean would be no number
    return x, y


def masked_mean(out, target):
    """A mean over counted tokens by the user's own arithmetic, of which nobody can know the weights."""
    every = F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=plain.IGNORED, reduction="none")
    return every.sum() / (target != plain.IGNORED).sum()


def test_a_mean_over_counted_tokens_of_the_users_own_is_refused():
    with pytest.raises(InputError, match=r"weighs rows by -100 in the target, of which.*return \(sum, weight\)"):
        first_step(plain.GPT().double(), masked_mean, *some_ignored())


def test_torchs_own_mean_over_counted_tokens_is_right_and_quiet():
    assert first_step(plain.GPT().double(), plain.mean_token_loss, *some_ignored()) == []


def test_sum_and_weight_is_right_and_quiet():
    assert first_step(plain.GPT().double(), plain.counted_token_loss, *some_ignored()) == []


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_a_mean_over_rows_is_quiet(precision):
    assert first_step(plain.GPT(), plain.token_loss, plain.tokens(8), plain.tokens(8), precision=precision) == []


def test_unequal_micro_batches_are_quiet():
    assert first_step(plain.GPT(), plain.token_loss, plain.tokens(7), plain.tokens(7)) == []


def test_batch_norm_raises_no_alarm():
    given = plain.case("conv")
    assert first_step(given.fresh(), given.loss, *given.batches[0]) == []


@pytest.mark.parametrize("drop", [nn.Dropout(0.5), "functional"])
def test_dropout_raises_no_alarm(drop):
    class Functional(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, self.training)

    layer = Functional() if drop == "functional" else drop
    given = plain.case("mlp")
    model = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 6), layer, nn.Linear(6, 6)).double()
    assert first_step(model, given.loss, *given.batches[0]) == []


def test_dropout_does_not_hide_a_hidden_weight():
    model = plain.GPT().double()
    model.blocks[3].register_forward_hook(lambda module, args, out: F.dropout(out, 0.3))
    with pytest.raises(InputError, match="weighs rows by -100"):
        first_step(model, masked_mean, *some_ignored())


def test_a_mean_weighted_by_what_the_model_says_is_refused():
    """No label tells, so nothing can be counted or changed: the gradients of the first batch tell."""

    def by_norm(out, target):
        every = F.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="none")
        weights = out.detach().flatten(0, 1)[:, 0].exp()
        return (every * weights).sum() / weights.sum()

    target = plain.tokens(8).clamp(min=1)
    target[:, -1] = 1 + target[:, -2] % 20  # nor does any row end in what looks like padding
    model = plain.GPT().double()
    with pytest.raises(InputError, match=r"a mean that weighs rows differently.*return \(sum, weight\)"):
        first_step(model, by_norm, plain.tokens(8), target)


def test_a_loss_that_mixes_rows_is_warned_of():
    """No weight would put it right, and some want it so."""

    def contrastive(out, target):
        flat = out.flatten(1)
        return F.cross_entropy(flat @ flat.T, torch.arange(len(flat)))

    messages = first_step(plain.GPT().double(), contrastive, plain.tokens(8), plain.tokens(8))
    assert len(messages) == 1
    assert "over 4 micro-batches" in messages[0]


def test_a_balance_loss_raises_no_alarm():
    given = plain.case("mlp")
    loss = lambda out, y: F.mse_loss(out[0], y) + 0.1 * out[1]  # noqa: E731
    assert first_step(plain.Mixture().double(), loss, *given.batches[0]) == []


class Scored(nn.Module):
    """A model that computes its loss itself, as those of the transformers library do."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.gpt, self.drop = plain.GPT(), nn.Dropout(drop)

    def forward(self, ids, labels):
        logits = self.drop(self.gpt(ids))
        return {"loss": masked_mean(logits, labels), "logits": logits}


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_a_loss_inside_the_model(drop):
    x, y = plain.tokens(8), plain.tokens(8)
    pipe = Pipeline(
        Scored(drop).double(), example=(x[:2], y[:2]), stages=2, microbatches=4, loss=lambda out, _: out["loss"]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step((x, y))
    assert not caught


def test_the_comparison_leaves_no_trace():
    given = plain.case("conv")
    model = given.fresh()
    pipe = Pipeline(model, example=given.example, stages=2, microbatches=4, loss=given.loss)
    state = torch.random.get_rng_state()
    pipe.step(*given.batches[0])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [int(b) for n, b in model.named_buffers() if n.endswith("tracked")] == [1] * 8
    assert all(stage.forwards == 4 for stage in pipe.stages)


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_dropout_inside_the_model_does_not_hide_a_hidden_weight(drop):
    x, y = some_ignored()
    pipe = Pipeline(
        Scored(drop).double(), example=(x[:2], y[:2]), stages=2, microbatches=4, loss=lambda out, _: out["loss"]
    )
    with pytest.raises(InputError, match=r"weighs rows by -100 in the inputs' 1, of which.*take it outside"):
        pipe.step((x, y))


class TimeFirst(nn.Module):
    """As torch's recurrent layers are by default: the first dimension is time, and the batch the second."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def test_a_model_whose_rows_are_not_the_first_dimension_is_told_so():
    x, y = torch.randn(8, 3, 6), torch.randn(8, 3, 6)
    (message,) = first_step(TimeFirst(), F.mse_loss, x, y)
    assert "batch_first=True" in message


def test_rows_that_are_the_first_dimension_are_quiet():
    x, y = torch.randn(8, 3, 6), torch.randn(8, 3, 6)
    model = TimeFirst()
    model.rnn.batch_first = True
    assert first_step(model, F.mse_loss, x, y) == []


class Counting(nn.Module):
    """Keeps a number and a list in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.bank = nn.Linear(6, 6), 0, []

    def forward(self, x):
        self.calls += 1
        self.bank.append(self.calls)
        return self.linear(x) * (1 + 0.1 * self.calls)


def test_the_comparison_leaves_no_trace_in_plain_attributes():
    model = nn.Sequential(Counting(), nn.Linear(6, 6)).double()
    pipe = Pipeline(model, example=torch.randn(2, 6).double(), stages=2, microbatches=4, loss=F.mse_loss)
    pipe.step(torch.randn(8, 6).double(), torch.randn(8, 6).double())
    assert model[0].calls == 4
    assert model[0].bank == [1, 2, 3, 4]
