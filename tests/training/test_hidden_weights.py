"""Losses that weigh rows by something that nobody marks as a weight are refused, whichever batch has it first; losses
that only look like it train. All are of untrained models, whose loss is the same everywhere, so that no loss tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plain
from penstock import InputError, Pipeline

torch.set_num_threads(1)
CLASSES = torch.linspace(0.1, 2, plain.WORDS).double()
MASK = 13  # a token in the middle of the vocabulary


def words(rows: int = 8) -> Tensor:
    """Without any of the values below."""
    drawn = torch.randint(1, 12, (rows, plain.LENGTH))
    drawn[:, -1] = 1 + drawn[:, -2] % 11  # nor does any row end in what looks like padding
    return drawn


def each(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.clamp(0, plain.WORDS - 1).flatten(), reduction="none").view(y.shape)


def kept(every: Tensor, mask: Tensor) -> Tensor:
    """A mean of the user's own."""
    return (every * mask).sum() / mask.sum()


class Weighed(NamedTuple):
    """A loss; what it is given where rows weigh alike; and where they do not. The first is the labels."""

    loss: Callable[..., Tensor]
    even: tuple[Tensor, ...]
    odd: tuple[Tensor, ...]


def of_mask(kind: torch.dtype) -> Weighed:
    even = torch.ones(8, plain.LENGTH, dtype=kind)
    odd = even.clone()
    odd[0, 2:], odd[3, 4:] = 0, 0
    return Weighed(lambda out, y, mask: kept(each(out, y), mask), (words(), even), (words(), odd))


def of_lengths() -> Weighed:
    def loss(out: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        return (each(out, y) * (torch.arange(y.shape[1]) < lengths[:, None])).sum() / lengths.sum()

    full = torch.full((8,), plain.LENGTH)
    return Weighed(loss, (words(), full), (words(), torch.tensor([6, 6, 6, 6, 3, 2, 1, 6])))


def of_row_weights(odd: list[float]) -> Weighed:
    def loss(out: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return (each(out, y).mean(1) * weights).sum() / weights.sum()

    return Weighed(loss, (words(), torch.ones(8).double()), (words(), torch.tensor(odd).double()))


def of_token_weights() -> Weighed:
    odd = torch.rand(8, plain.LENGTH).double() + 0.5
    return Weighed(lambda out, y, w: kept(each(out, y), w), (words(), torch.ones_like(odd)), (words(), odd))


def of_classes() -> Weighed:
    same = torch.full((8, plain.LENGTH), 7)
    return Weighed(lambda out, y: (each(out, y) * CLASSES[y]).sum() / CLASSES[y].sum(), (same,), (words(),))


def of_a_token() -> Weighed:
    even = words()
    even[:, 2] = MASK
    odd = even.clone()
    odd[0, :4], odd[5, :3] = MASK, MASK
    return Weighed(lambda out, y: kept(each(out, y), y == MASK), (even,), (odd,))


def of_the_largest() -> Weighed:
    odd = words()
    odd[0, 1:5] = 255
    return Weighed(lambda out, y: kept(each(out, y), y != 255), (words(),), (odd,))


def of_numbers(nothing: float) -> Weighed:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        mask = ~y.isnan() & (y != nothing)
        return kept((out.mean(-1) - y.nan_to_num()).square(), mask)

    even = torch.randn(8, plain.LENGTH).double()
    odd = even.clone()
    odd[0, 1:] = nothing
    return Weighed(loss, (even,), (odd,))


CASES: dict[str, Callable[[], Weighed]] = {
    **{
        f"{kind} mask": lambda kind=kind: of_mask(kind)
        for kind in (torch.bool, torch.int64, torch.uint8, torch.float64)
    },
    "lengths": of_lengths,
    "weights of rows": lambda: of_row_weights([1, 1.4, 0.6, 1, 1.2, 1, 0.8, 1.1]),
    "one row has another weight": lambda: of_row_weights([1, 1, 1, 1, 1, 1, 1, 2]),
    "weights of tokens": of_token_weights,
    "weights of classes": of_classes,
    "a token": of_a_token,
    "the largest label": of_the_largest,
    "nan": lambda: of_numbers(float("nan")),
    "a number among numbers": lambda: of_numbers(-1.0),
}


def untrained(layers: int = 4) -> plain.GPT:
    torch.manual_seed(1)
    model = plain.GPT(layers=layers).double()
    with torch.no_grad():
        model.head.weight.mul_(1e-6)
    return model


class Inside(nn.Module):
    """Takes its loss itself; beside another scalar where `balance` is."""

    def __init__(self, loss: Callable[..., Tensor], balance: bool) -> None:
        super().__init__()
        self.gpt, self.loss, self.balance = untrained(), loss, balance

    def forward(self, ids: Tensor, **labels: Tensor) -> dict[str, Tensor]:
        logits = self.gpt(ids)
        loss = self.loss(logits, *labels.values())
        balance = logits.square().mean()
        return {"loss": loss + 0.1 * balance, "balance": balance} if self.balance else {"loss": loss, "logits": logits}


def pipeline(model: nn.Module, loss: Callable[..., Any], example: Any, **options: Any) -> Pipeline:
    return Pipeline(
        model, example=example, stages=2, microbatches=4, loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), **options,
    )  # fmt: skip


@pytest.mark.parametrize("where", ["outside", "inside", "inside beside a balance loss"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:expected the whole batch's loss")
def test_a_mean_that_weighs_rows_is_refused_in_the_batch_that_shows_it(name, where):
    torch.manual_seed(4)
    case = CASES[name]()

    def batch(labels: tuple[Tensor, ...]) -> Any:
        if where == "outside":
            return words(), labels if len(labels) > 1 else labels[0]
        return {"ids": words(), **{f"y{at}": label for at, label in enumerate(labels)}}, None

    if where == "outside":
        model: nn.Module = untrained()
        loss = lambda out, y: case.loss(out, *(y if isinstance(y, tuple) else (y,)))  # noqa: E731
        example: Any = words(2)
    else:
        model, loss = Inside(case.loss, "balance" in where), lambda out, _: out["loss"]
        example = {key: value[:2] for key, value in batch(case.even)[0].items()}
    pipe = pipeline(model, loss, example)
    pipe.step(*batch(case.even))
    before = plain.weights(model)
    with pytest.raises(InputError, match=r"one that weighs rows by .*return \(sum, weight\)"):
        pipe.step(*batch(case.odd))
    assert plain.off(plain.weights(model), before) == 0


LENGTHS = torch.tensor([1, 2, 3, 1, 2, 1, 3, 2])
FINE: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any]] = {
    "squares": (F.mse_loss, torch.randn(8, 6, plain.WORDS).double()),
    "clamped": (lambda out, y: (out - y.clamp(-1, 1)).square().mean(), torch.randn(8, 6, plain.WORDS).double().round()),
    "roots of rows": (lambda out, y: (out - y).square().mean((1, 2)).sqrt().mean(), torch.randn(8, 6, 1).double()),
    "probabilities": (
        lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(0, 1)),
        torch.rand(8, 6, plain.WORDS).double().softmax(-1),
    ),
    "within a domain": (lambda out, y: (out.mean(-1) - y.arccos()).square().mean(), torch.rand(8, 6).double()),
    "sequences": (
        lambda out, y: F.ctc_loss(
            out.log_softmax(-1).transpose(0, 1), y[0], torch.full((len(out),), 6), y[1], reduction="mean"
        ),
        (torch.arange(40).view(8, 5) % 4 + 1, LENGTHS),
    ),
    "weights that nothing divides by": (
        lambda out, y: (each(out, y[0]).mean(1) * y[1]).mean(),
        (words(), torch.rand(8).double()),
    ),
    "chosen tokens": (
        lambda out, y: F.cross_entropy(out[y >= 0], y[y >= 0]),
        torch.where(torch.arange(6) < LENGTHS[:, None] * 2, words(), -100),
    ),
}


@pytest.mark.parametrize("name", FINE)
@pytest.mark.filterwarnings("error")
def test_losses_that_no_row_weighs_in_train_with_the_numbers_of_the_whole_batch(name):
    loss, target = FINE[name]
    net, x = untrained(), words()
    value = loss(net(x), target)
    value.backward()
    gradients = plain.gradients(net)
    net.zero_grad()
    pipe = Pipeline(net, example=x[:2], stages=2, microbatches=4, loss=loss)
    assert pipe.step(x, target).loss == pytest.approx(value.item(), abs=1e-12)
    assert plain.off(plain.gradients(net), gradients) < 1e-11


def test_rows_that_are_compared_by_their_labels_are_told_of_one_micro_batch():
    def contrastive(out: Tensor, y: Tensor) -> Tensor:
        rows = F.normalize(out.mean(1), dim=-1)
        same = (y[:, None] == y[None]).double()
        return -((rows @ rows.T).log_softmax(-1) * same).sum(1).div(same.sum(1)).mean()

    y = torch.tensor([1, 4, 2, 3, 3, 2, 4, 5])
    with pytest.raises(InputError, match="weighs rows by"):
        pipeline(plain.GPT().double(), contrastive, words(2)).step(words(), y)
    Pipeline(plain.GPT().double(), example=words(2), stages=2, microbatches=1, loss=contrastive).step(words(), y)


def test_inputs_that_layers_of_the_last_stage_take_may_be_mixed_by_them():
    """A second tower there mixes rows, whatever the loss does."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = plain.mlp().double(), nn.Linear(6, 6).double()

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            x = self.one(x) + self.two(other)
            return x * x.mean(0).exp()

    given = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    pipe = pipeline(Towers(), F.mse_loss, tuple(part[:2] for part in given), verify=True)
    with pytest.warns(UserWarning, match="expected a model whose result for one row does not depend on the others"):
        pipe.step(given, torch.randn(8, 6).double())


class Window(nn.Module):
    """A layer that has no number for rows whose mask leaves too little, as attention by a narrow window has none; no
    row of the user's is such a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, plain.WORDS)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        enough = mask.sum(1) > plain.LENGTH - 3
        return self.linear(hidden * torch.where(enough, 1.0, torch.nan)[:, None, None] * mask[..., None])


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.window = nn.Embedding(plain.WORDS, 4), Window()

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        return self.window(self.embed(words), mask)


def test_a_mask_that_layers_take_may_leave_no_number_where_it_is_changed_to_look_at_the_loss():
    x, mask = words(), torch.ones(8, plain.LENGTH, dtype=torch.long)
    for row, zeros in enumerate((1, 2, 2, 1, 1, 1, 2, 2)):
        mask[row, plain.LENGTH - zeros :] = 0
    pipe = pipeline(Masked().double(), lambda out, y: each(out, y).mean(), (x, mask), cuts=["window"])
    assert torch.isfinite(torch.tensor(pipe.step((x, mask), x).loss))
