"""Tokens that are not counted: a mini-batch cut into micro-batches has the whole's loss and gradients, whatever each of
them has to count. References are one plain backward of the whole batch, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as imported_by_name

import plain
from penstock import InputError, Pipeline

torch.set_num_threads(1)
EXACT = 1e-12
CLASSES = torch.linspace(0.1, 2, plain.WORDS).double()


def flat(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return out.flatten(0, 1), y.flatten()


def next_tokens(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def two_means(out: Tensor, y: Tensor) -> Tensor:
    """Each with a count of its own."""
    ahead = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return (F.cross_entropy(*flat(out, y)) + 0.5 * F.cross_entropy(out.flatten(0, 1), ahead)) / 2


def grown_in_place(out: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(*flat(out, y))
    loss += 0.1 * out.square().mean()
    return loss


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "function": lambda out, y: F.cross_entropy(*flat(out, y)),
    "imported by name": lambda out, y: imported_by_name(*flat(out, y)),
    "module": lambda out, y: nn.CrossEntropyLoss()(*flat(out, y)),
    "images": lambda out, y: F.cross_entropy(out.transpose(1, 2), y),
    "nll": lambda out, y: F.nll_loss(*flat(out.log_softmax(-1), y)),
    "nll module": lambda out, y: nn.NLLLoss(weight=CLASSES)(*flat(out.log_softmax(-1), y)),
    "class weights": lambda out, y: F.cross_entropy(*flat(out, y), weight=CLASSES),
    "fresh class weights": lambda out, y: 2 * F.cross_entropy(*flat(out, y), weight=CLASSES.clone()),
    "label smoothing": lambda out, y: F.cross_entropy(*flat(out, y), label_smoothing=0.1),
    "other ignored": lambda out, y: F.cross_entropy(*flat(out, y.where(y >= 0, 3)), ignore_index=3),
    "next tokens": next_tokens,
    "scaled": lambda out, y: 0.3 * F.cross_entropy(*flat(out, y)),
    "beside a mean over rows": lambda out, y: F.cross_entropy(*flat(out, y)) + 0.1 * out.square().mean(),
    "in place": grown_in_place,
    "two means": two_means,
    "counted by the user": plain.counted_token_loss,
    "mean made a sum by the user": lambda out, y: ((y >= 0).sum() * F.cross_entropy(*flat(out, y)), (y >= 0).sum()),
    "ignored as zeros": lambda out, y: F.cross_entropy(*flat(out, y), reduction="none").mean(),
    "mean of means": lambda out, y: torch.stack(
        [F.cross_entropy(o, t, reduction="sum") / (t >= 0).sum().clamp(min=1) for o, t in zip(out, y, strict=True)]
    ).mean(),
}


def model() -> plain.GPT:
    torch.manual_seed(1)
    return plain.GPT(layers=4).double()


def wanted(net: nn.Module, loss: Callable[..., Any], x: Any, y: Any) -> tuple[float, dict[str, Tensor]]:
    """The whole batch's loss and gradients."""
    whole = copy.deepcopy(net)
    whole.zero_grad()
    found = loss(whole(**x) if isinstance(x, dict) else whole(x), y)
    value = found[0] / found[1] if isinstance(found, tuple) else found
    value.backward()
    return value.item(), plain.gradients(whole)


def pipeline(net: nn.Module, loss: Callable[..., Any], x: Any, microbatches: int = 4, **options: Any) -> Pipeline:
    example = {name: value[:2] if value.dim() else value for name, value in x.items()} if isinstance(x, dict) else x[:2]
    return Pipeline(net, example=example, stages=2, microbatches=microbatches, loss=loss, **options)


def agree(net: nn.Module, loss: Callable[..., Any], batches: list[Any], to: float = EXACT, **options: Any) -> Pipeline:
    """Each batch's loss and gradients."""
    pipe = pipeline(net, loss, batches[0][0], **options)
    for x, y in batches:
        value, gradients = wanted(net, loss, x, y)
        net.zero_grad()
        assert pipe.step(x, y).loss == pytest.approx(value, abs=to)
        assert plain.off(plain.gradients(net), gradients) < to
        net.zero_grad()
    return pipe


def uneven(rows: int = 8, seed: int = 2) -> tuple[Tensor, Tensor]:
    """The last micro-batch has nothing to count."""
    torch.manual_seed(seed)
    return plain.with_ignored(rows)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_losses_everyone_uses(kind):
    even = plain.tokens(8), plain.tokens(8).clamp(min=1)
    agree(model(), LOSSES[kind], [even, uneven(), even, uneven(seed=5)])


@pytest.mark.parametrize("kind", ["function", "two means", "in place"])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [("gpipe", {"recompute": "always"}), ("zb-h1", {}), ("1f1b", {"recompute": "except-last"}), ("zb-v", {})],
)
def test_every_schedule_and_recompute(kind, schedule, options):
    cut = {"chunks": 2} if schedule == "zb-v" else {}
    agree(model(), LOSSES[kind], [uneven(), uneven(seed=3)], schedule=schedule, **options, **cut)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_the_counts(data):
    rows, parts = data.draw(st.integers(4, 9)), data.draw(st.integers(2, 4))
    kind = data.draw(st.sampled_from(["function", "class weights", "two means", "in place", "next tokens"]))
    counts = data.draw(st.lists(st.integers(0, plain.LENGTH), min_size=rows, max_size=rows))
    x, y = plain.tokens(rows), plain.tokens(rows)
    for row, count in enumerate(counts):
        y[row, count:] = -100
    y[data.draw(st.integers(0, rows - 1))] = 5  # something is counted
    agree(model(), LOSSES[kind], [(x, y)], microbatches=parts)


def test_a_micro_batch_with_nothing_to_count_may_come_first():
    x, y = uneven()
    agree(model(), LOSSES["function"], [(x.flip(0), y.flip(0))])
    agree(model(), LOSSES["two means"], [(x.flip(0), y.flip(0))])


def test_a_batch_with_nothing_to_count_is_refused():
    x, y = uneven()
    for kind in ("function", "two means"):
        pipe = pipeline(model(), LOSSES[kind], x)
        with pytest.raises(InputError, match=r"positive weight.*skip batches without targets"):
            pipe.step(x, torch.full_like(y, -100))


def or_nothing(out: Tensor, y: Tensor) -> Tensor:
    """As written by those who know that a mean over nothing is NaN."""
    return F.cross_entropy(*flat(out, y)) if (y >= 0).any() else out.sum() * 0


def test_a_zero_of_the_users_own_in_place_of_a_mean_over_nothing():
    agree(model(), or_nothing, [uneven(), uneven(seed=4)])


@pytest.mark.parametrize("kind", ["function", "beside a mean over rows", "two means"])
def test_evaluation(kind):
    x, y = uneven()
    net = model()
    value, _ = wanted(net, LOSSES[kind], x, y)
    assert pipeline(net, LOSSES[kind], x).evaluate([(x, y)]) == pytest.approx(value, abs=EXACT)


def test_evaluation_over_batches_counts_tokens():
    (x, y), (v, w) = uneven(), uneven(seed=3)
    net = model()
    both, _ = wanted(net, LOSSES["function"], torch.cat([x, v]), torch.cat([y, w]))
    assert pipeline(net, LOSSES["function"], x).evaluate([(x, y), (v, w)]) == pytest.approx(both, abs=EXACT)


def test_accumulated_batches_count_tokens():
    (x, y), (v, w) = uneven(), uneven(seed=3)
    net = model()
    _, both = wanted(net, LOSSES["function"], torch.cat([x, v]), torch.cat([y, w]))
    pipe = pipeline(net, LOSSES["function"], x, accumulate=2)
    pipe.step(x, y)
    pipe.step(v, w)
    assert plain.off(plain.gradients(net), both) < EXACT


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision(precision):
    x, y = uneven()
    net = model().float()
    value, gradients = wanted(net, LOSSES["function"], x, y)
    pipe = pipeline(net, LOSSES["function"], x, precision=precision)
    step = pipe.step(x, y)
    assert step.loss == pytest.approx(value, rel=1e-2)
    assert plain.off(plain.gradients(net), gradients) < 0.05


def test_torchs_functions_are_torchs_own_afterwards():
    before = torch._C._nn.cross_entropy_loss, torch._C._nn.nll_loss_nd
    x, y = uneven()
    pipe = pipeline(model(), LOSSES["function"], x)
    pipe.step(x, y)
    with pytest.raises(InputError):
        pipe.step(x, torch.full_like(y, -100))
    assert (torch._C._nn.cross_entropy_loss, torch._C._nn.nll_loss_nd) == before
    assert F.cross_entropy(torch.randn(2, 3), torch.tensor([-100, -100])).isnan()


class Labelled(nn.Module):
    """Computes its loss itself, as models of the transformers library do; beside a balance loss where `balance` is."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], balance: float | None = None) -> None:
        super().__init__()
        self.gpt, self.loss, self.balance = model(), loss, balance

    def forward(self, ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits = self.gpt(ids)
        if num_items_in_batch is not None:
            loss = F.cross_entropy(*flat(logits, labels), reduction="sum") / num_items_in_batch
        else:
            loss = self.loss(logits, labels)
        if self.balance is None:
            return {"loss": loss, "logits": logits}
        balance = logits.softmax(-1).mean((0, 1)).square().sum()  # of all rows at once
        return {"loss": loss + self.balance * balance, "balance": balance, "logits": logits}


def its_own(out: dict[str, Tensor], _: Any) -> Tensor:
    return out["loss"]


def inside(batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], None]:
    return {"ids": batch[0], "labels": batch[1]}, None


INSIDE = ["function", "module", "class weights", "next tokens", "two means", "in place"]


@pytest.mark.parametrize("kind", INSIDE)
def test_labels_inside_forward(kind):
    even = plain.tokens(8), plain.tokens(8).clamp(min=1)
    agree(Labelled(LOSSES[kind]), its_own, [inside(even), inside(uneven()), inside(uneven(seed=7))])


def test_a_loss_module_inside_the_model():
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt, self.criterion = model(), nn.CrossEntropyLoss()

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return self.criterion(*flat(self.gpt(ids), labels))

    agree(Ends(), lambda out, _: out, [inside(uneven())])


def test_the_number_of_items_in_the_batch_is_respected():
    """Then the loss is a sum over what the user has counted, perhaps in several batches."""
    x, y = uneven()
    for items in (torch.tensor(17.0).double(), torch.tensor(24)):
        batch = {"ids": x, "labels": y, "num_items_in_batch": items}
        agree(Labelled(LOSSES["function"]), its_own, [(batch, None)])


def parted(net: Labelled, x: Tensor, y: Tensor, parts: int) -> tuple[float, dict[str, Tensor]]:
    """The tokens' loss of the whole batch, and the mean of the micro-batches' balance losses."""
    whole = copy.deepcopy(net)
    rows = [whole(a, b)["balance"] for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)]
    value = net.loss(whole.gpt(x), y) + net.balance * torch.stack(rows).mean()
    value.backward()
    return value.item(), plain.gradients(whole)


@pytest.mark.parametrize("kind", ["function", "module", "class weights"])
@pytest.mark.filterwarnings("error")
def test_a_balance_loss_beside_the_loss(kind):
    net = Labelled(LOSSES[kind], balance=0.5)
    (x, y), none = uneven(), None
    value, gradients = parted(net, x, y, 4)
    pipe = pipeline(net, its_own, inside((x, y))[0])
    assert pipe.step({"ids": x, "labels": y}, none).loss == pytest.approx(value, abs=EXACT)
    assert plain.off(plain.gradients(net), gradients) < EXACT


def masked(out: Tensor, y: Tensor) -> Tensor:
    """A mean of the user's own."""
    every = F.cross_entropy(*flat(out, y.clamp(min=0)), reduction="none").view(y.shape)
    return (every * (y >= 0)).sum() / (y >= 0).sum().clamp(min=1)


def few_ignored() -> tuple[Tensor, Tensor]:
    """Full but for five tokens, all in the first micro-batch."""
    x, y = plain.tokens(8), plain.tokens(8)
    y[0, 1:] = -100
    return x, y


@pytest.mark.parametrize("where", ["outside", "inside", "inside beside a balance loss"])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_mean_of_the_users_own_is_found_in_whatever_batch_has_ignored_tokens_first(where, zeros):
    """With a head of zeros, too: all tokens have one loss then, and only gradients tell."""
    even = plain.tokens(8), plain.tokens(8)
    net = model() if where == "outside" else Labelled(masked, 0.1 if "balance" in where else None)
    gpt = net if where == "outside" else net.gpt
    gpt.head.weight = nn.Parameter(gpt.head.weight.detach() * (0 if zeros else 1))
    given = (lambda batch: batch) if where == "outside" else inside
    loss = masked if where == "outside" else its_own
    pipe = pipeline(net, loss, given(even)[0], optimizer=plain.adamw)
    pipe.step(*given(even))
    if zeros:
        with torch.no_grad():
            gpt.head.weight.zero_()
    before = plain.weights(net)
    with pytest.raises(InputError, match=r"weighs rows by -100 in the (target|inputs' labels), of which micro-batches"):
        pipe.step(*given(few_ignored()))
    assert plain.off(plain.weights(net), before) == 0
    assert pipe.step(*given(even)).index == 1  # nothing is left behind


@pytest.mark.parametrize("kind", ["mask", "float mask", "zeros", "padding"])
def test_other_values_that_a_mean_may_leave_out(kind):
    x, y = plain.tokens(8), plain.tokens(8).clamp(min=1)
    mask = torch.ones_like(y, dtype=torch.bool)
    mask[0, 3:] = False
    y = torch.where(mask, y, {"zeros": 0, "padding": 19}.get(kind, 1))

    def loss(out: Tensor, target: Any) -> Tensor:
        labels, kept = target
        kept = {"zeros": labels != 0, "padding": labels != 19}.get(kind, kept)
        return (F.cross_entropy(*flat(out, labels), reduction="none").view(labels.shape) * kept).sum() / kept.sum()

    given = mask.double() if kind == "float mask" else mask
    even = (x, (plain.tokens(8).clamp(1, 15), torch.ones_like(given)))
    pipe = pipeline(model(), loss, x)
    pipe.step(*even)
    with pytest.raises(InputError, match="weighs rows by"):
        pipe.step(x, (y, given if "mask" in kind else torch.ones_like(given)))


def test_a_mean_of_the_users_own_trains_as_long_as_counts_are_equal():
    x, y = plain.tokens(8), plain.tokens(8)
    y[:, 4:] = -100
    agree(model(), masked, [(x, y), (plain.tokens(8), y.flip(0))])


def test_without_verify_nothing_is_looked_at():
    x, y = few_ignored()
    pipe = pipeline(model(), masked, x, verify=False)
    assert pipe.step(x, y).updated is False


def test_labels_that_are_made_up_are_refused_where_their_counts_differ_and_only_there():
    x, y = plain.tokens(8), plain.tokens(8)
    y[:, 4:] = -100

    def loss(out: Tensor, target: Tensor) -> Tensor:
        made = torch.where(target >= 0, (target * 7 + 1) % 11, -100)
        return F.cross_entropy(*flat(out, made)) + out.square().mean()

    pipe = agree(model(), loss, [(x, y)])
    with pytest.raises(InputError, match="return \\(sum, weight\\)"):
        pipe.step(*few_ignored())


def test_labels_that_are_made_up_are_right_where_the_loss_is_the_mean():
    def loss(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(*flat(out, torch.where(target >= 0, (target * 7 + 1) % 11, -100)))

    agree(model(), loss, [few_ignored(), uneven()])
