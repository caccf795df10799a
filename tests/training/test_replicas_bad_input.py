"""What replicas cannot do is refused with one message, before anything has moved."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
import plain
from penstock import InputError, Pipeline, SplitError
from replicated import agree, pipeline

torch.set_num_threads(1)
F64 = torch.float64


@pytest.mark.parametrize(
    ("replicas", "words"),
    [
        (0, "replicas to be a positive number, or one for each pipeline rank, but got 0"),
        (-1, "replica"),
        ("2", "replica"),
        (True, "replica"),
        (1.5, "replica"),
        ([2], "a positive replica count for each of 2 ranks, but got [2]"),
        ([2, 1, 1], "a positive replica count for each of 2 ranks, but got [2, 1, 1]"),
        ([2, 0], "replicas to be a positive number, or one for each pipeline rank, but got [2, 0]"),
        ([2, "1"], "replica"),
        ([], "replicas to be a positive number, or one for each pipeline rank, but got []"),
        ([[2], 1], "replica"),
        ({0: 2}, "replica"),
    ],
)
def test_replicas_that_are_no_counts(replicas, words):
    given = plain.case("mlp")
    with pytest.raises(InputError, match=f"^expected .*{re.escape(words)}") as told:
        Pipeline(given.fresh(), example=given.example, stages=2, replicas=replicas, loss=given.loss)
    assert "; " in str(told.value)


def test_a_number_is_that_many_replicas_of_every_stage():
    given = plain.case("mlp")
    assert pipeline(given, [2, 2]).schedule.shape.replicas == (2, 2)
    pipe = Pipeline(given.fresh(), example=given.example, stages=2, replicas=2, loss=given.loss)
    assert pipe.schedule.shape.replicas == (2, 2)


def test_a_batch_with_fewer_rows_than_replicas():
    given = plain.case("mlp", rows=3)
    pipe = pipeline(given, [1, 4])
    before = plain.weights(pipe.model)
    with pytest.raises(
        InputError, match=r"a batch of at least 4 rows, one for each replica, but got 3; .*fewer replicas"
    ):
        pipe.step(*given.batches[0])
    assert plain.off(plain.weights(pipe.model), before) == 0
    more = plain.case("mlp", rows=4).batches[0]
    assert pipe.step(*more).updated


@pytest.mark.parametrize("replicas", [[2], [2, 1], [1, 2]], ids=str)
def test_a_loss_that_is_neither_a_mean_over_rows_nor_a_sum_with_its_weight(replicas):
    """Also where micro-batches are alike, and only replicas' parts of them are not."""
    given = plain.case("gpt")
    x, y = plain.tokens(8), plain.tokens(8).clamp(min=1)
    y[::2, 2:] = plain.IGNORED  # the first row of two: of each micro-batch the first replica's, where there are two

    def own_mean(out: Tensor, target: Tensor) -> Tensor:
        kept = target != plain.IGNORED
        scores = out.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
        return -(scores * kept).sum() / kept.sum()

    if replicas == [2, 1]:  # the last stage has whole micro-batches, each with as many counted
        assert pipeline(given, replicas, loss=own_mean).step(x, y).updated
        y[:2] = plain.IGNORED
        y[1, 0] = 3
    pipe = pipeline(given, replicas, loss=own_mean)
    before = plain.weights(pipe.model)
    with pytest.raises(InputError, match=r"a loss that is a mean over rows, or \(sum, weight\).*weighs rows by"):
        pipe.step(x, y)
    assert plain.off(plain.weights(pipe.model), before) == 0


@pytest.mark.parametrize("replicas", [[2, 1], [2], [2, 2]], ids=str)
def test_sparse_gradients(replicas):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(F64)
    x = torch.randint(0, 9, (8, 3))
    with pytest.raises(InputError, match=r"dense gradients in a stage with replicas.*'0.weight'.*sparse=False"):
        Pipeline(model, example=x[:2], stages=len(replicas), replicas=replicas, loss=lambda out, _: out.square().mean())


def test_sparse_gradients_in_a_stage_without_replicas_are_fine():
    torch.manual_seed(0)
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(F64)
        x = torch.randint(0, 9, (8, 3))
        pipe = Pipeline(
            model, example=x[:2], cuts=["1"], stages=2, replicas=[1, 2], loss=lambda out, _: out.square().mean(),
            optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        )  # fmt: skip
        pipe.step(x)
        found.append(plain.weights(model))
    assert plain.off(found[0], found[1]) < 1e-12


class Counting(nn.Module):
    """A layer with a buffer that every training forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("seen", torch.ones((), dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.detach().mean()
        return torch.tanh(self.layer(x))


def test_a_buffer_that_the_forward_changes_in_a_stage_with_replicas():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Counting(), nn.Linear(6, 6)).to(F64)
    given = plain.Case(model, F.mse_loss, plain.case("mlp").batches)
    with pytest.raises(SplitError, match=r"'2\.seen', which the forward changes; give its stage one replica"):
        pipeline(given, [1, 2], cuts=["2"])
    with pytest.raises(SplitError, match=r"'2\.seen', which the forward changes"):
        pipeline(given, [2])
    pipe = pipeline(given, [2, 1], cuts=["2"])
    pipe.step(*given.batches[0])
    assert float(pipe.model[2].seen) != 1


class Centred(nn.Module):
    """A mean over the batch, which a later stage subtracts."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.middle, self.mean = nn.Linear(6, 6), nn.Linear(6, 6)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mean = self.mean(x.mean(0) if self.how == "mean" else x.T @ x)
        if self.how == "turned round":
            x = x.flip(0)
        x = self.middle(x)
        return self.last(x if self.how == "turned round" else x - mean.mean(0))


@pytest.mark.parametrize("how", ["mean", "product"])
def test_values_without_rows_that_depend_on_all_rows_between_unequal_replicas(how):
    given = plain.Case(Centred(how).to(F64), F.mse_loss, plain.case("mlp").batches)
    with pytest.raises(
        SplitError, match=r"'mean'.*that depends on all rows together; give both stages the same number"
    ):
        pipeline(given, [2, 1], cuts=["middle"], verify=False)
    with pytest.raises(SplitError, match=r"'mean'.*that depends on all rows together"):
        pipeline(given, [1, 2], cuts=["middle"], verify=False)
    pipeline(given, [2, 2], cuts=["middle"], verify=False)  # each micro-batch's part is then a batch of its own


class Marked(nn.Module):
    """Tokens, and their mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.middle, self.last = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        mean = x.mean(0)
        return self.last(self.middle(x) - mean)


@pytest.mark.parametrize("example", [torch.zeros(2, 5), torch.zeros(1, 5), torch.arange(5)[None]])
def test_a_mean_over_rows_that_are_alike_in_the_example(example):
    with pytest.raises(SplitError, match="that depends on all rows together"):
        Pipeline(Marked(), example=example.long(), stages=2, replicas=[2, 1], cuts=["middle"], verify=False)


@pytest.mark.parametrize("example", [torch.zeros(1, 6), torch.ones(3, 6)])
def test_a_mean_over_numbers_that_are_alike_in_the_example(example):
    with pytest.raises(SplitError, match="that depends on all rows together"):
        Pipeline(Centred("mean"), example=example, stages=2, replicas=[2, 1], cuts=["middle"], verify=False)


def test_rows_in_another_order_between_unequal_replicas():
    given = plain.Case(Centred("turned round").to(F64), F.mse_loss, plain.case("mlp").batches)
    with pytest.raises(SplitError, match=r"'middle'.*not one row after the other; give both stages the same number"):
        pipeline(given, [2, 1], cuts=["last"], verify=False)


class Doubled(nn.Module):
    """Rows that are joined to others behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(torch.cat([x, -x]))
        x = self.last(torch.tanh(x))
        return x[: len(x) // 2] + x[len(x) // 2 :]


def test_rows_of_which_each_is_there_twice_between_unequal_replicas():
    given = plain.Case(Doubled().to(F64), F.mse_loss, plain.case("mlp").batches)
    with pytest.raises(SplitError, match=r"'torch.tanh'.*of shape \(8, 6\) for 4 rows, not one row after the other"):
        pipeline(given, [2, 1], cuts=["last"])
    agree(given, [2, 2], cuts=["last"])


def test_a_switch_to_other_replicas():
    given = plain.case("mlp")
    pipe = pipeline(given, [2, 1])
    other = penstock.schedule("1f1b", stages=2, microbatches=4, replicas=[1, 2])
    with pytest.raises(InputError, match=r"placed on ranks \[0, 1\] with replicas \[2, 1\].*and \[1, 2\]"):
        pipe.switch(other)
    pipe.switch("zb-h1")
    assert pipe.schedule.shape.replicas == (2, 1)


def test_a_schedule_of_the_users_own_says_the_replicas():
    given = plain.case("mlp")
    own = penstock.schedule("1f1b", stages=2, microbatches=4, replicas=[2, 1])
    options = {"example": given.example, "loss": given.loss, "optimizer": plain.adamw}
    pipe = Pipeline(given.fresh(), schedule=own, **options)
    list(pipe.train(given.batches[:2]))
    pipe.switch("zb-h1")
    list(pipe.train(given.batches[2:]))
    assert plain.off(plain.weights(pipe.model), plain.weights(plain.trained(given)[1])) < 1e-10
    assert Pipeline(given.fresh(), schedule=own, replicas=[2, 1], **options).schedule.shape.replicas == (2, 1)
    with pytest.raises(InputError, match=r"a schedule with replicas \[1, 2\], but got \[2, 1\]"):
        Pipeline(given.fresh(), schedule=own, replicas=[1, 2], **options)
