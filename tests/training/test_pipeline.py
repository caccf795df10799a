"""The verbs beside step: train, evaluate, forward, state_dict, load_state_dict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plain
from penstock import Pipeline

torch.set_num_threads(1)
F64 = torch.float64


def pipeline(given: plain.Case, **options) -> Pipeline:
    options = {"stages": 2, "microbatches": 4, "loss": given.loss} | options
    return Pipeline(given.fresh(), example=given.example, **options)


@pytest.mark.parametrize("kind", ["gpt", "conv", "mlp"])
def test_evaluate_is_the_mean_over_all_rows_whatever_the_batches(kind):
    given = plain.case(kind)
    pipe, model = pipeline(given), given.fresh().eval()
    x, y = (torch.cat([batch[side] for batch in given.batches]) for side in (0, 1))
    with torch.no_grad():
        wanted = given.loss(model(x), y).item()
    batches = [(x[:17], y[:17]), (x[17:25], y[17:25]), (x[25:38], y[25:38]), (x[38:], y[38:])]  # the last has two rows
    assert len(batches[-1][0]) < pipe.microbatches
    assert pipe.evaluate(batches) == pytest.approx(wanted, rel=1e-12)
    assert pipe.evaluate(iter(batches)) == pytest.approx(wanted, rel=1e-12)
    assert pipe.model.training
    assert all(p.grad is None for p in pipe.model.parameters())


def test_evaluate_weighs_by_tokens_also_batches_without_any():
    given = plain.case("gpt")
    pipe = pipeline(given, loss=plain.counted_token_loss)
    x, y = torch.cat([b[0] for b in given.batches]), torch.cat([b[1] for b in given.batches])
    y[3:9] = plain.IGNORED
    y[30:, 2:] = plain.IGNORED
    with torch.no_grad():
        wanted = plain.mean_token_loss(given.fresh()(x), y).item()
    batches = [(x[:3], y[:3]), (x[3:9], y[3:9]), (x[9:], y[9:])]
    assert pipe.evaluate(batches) == pytest.approx(wanted, rel=1e-12)


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    name: str = "an output"


class Several(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.lstm, self.last = nn.Linear(6, 6), nn.LSTM(6, 6, 3, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor):
        out, (hidden, _) = self.lstm(self.first(x))
        logits = self.last(out)
        return {
            "dict": {"logits": logits, "hidden": hidden, "note": "text"},
            "tuple": (logits, hidden),
            "list": [logits, hidden, None],
            "named": Pair(logits, hidden),
            "dataclass": Output(logits, hidden),
            "folded": logits.flatten(0, 1),
            "mean": logits.mean(),
            "constant": (logits, torch.arange(3, device=x.device)),
        }[self.kind]


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize("kind", ["dict", "tuple", "list", "named", "dataclass", "folded", "mean", "constant"])
def test_forward_gives_what_the_model_gives(kind, rows):
    from penstock.model import tree

    torch.manual_seed(0)
    model = Several(kind).to(F64)
    pipe = Pipeline(model, example=torch.randn(2, 5, 6, dtype=F64), cuts=["last"], microbatches=2)
    x = torch.randn(rows, 5, 6, dtype=F64)
    with torch.no_grad():
        wanted = model(x)
    found = pipe.forward(x)
    assert type(found) is type(wanted)
    pairs = list(zip(tree.tensors(found), tree.tensors(wanted), strict=True))
    assert pairs
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    if kind == "dict":
        assert found["note"] == "text"
    if kind == "dataclass":
        assert found.name == "an output"


def test_forward_after_a_larger_batch_gives_the_new_rows():
    given = plain.case("gpt", rows=16)
    pipe = pipeline(given)
    x = given.batches[0][0]
    wanted = given.fresh()(x).detach()
    for rows in (16, 5, 3, 1, 16):
        torch.testing.assert_close(pipe.forward(x[:rows]), wanted[:rows], rtol=1e-12, atol=1e-12)


def test_state_has_the_models_own_names_and_goes_into_any_other_split():
    given = plain.case("gpt")
    pipe = pipeline(given, optimizer=plain.adamw)
    list(pipe.train(given.batches))
    state = pipe.state_dict()
    assert state.keys() == given.model.state_dict().keys()
    other = pipeline(given, stages=4, schedule="zb-h1")
    other.load_state_dict({name: value.clone() for name, value in state.items()})
    assert other.evaluate(given.batches) == pytest.approx(pipe.evaluate(given.batches), rel=1e-12)
    whole = given.fresh()
    whole.load_state_dict(state)
    assert plain.off(plain.weights(whole), plain.weights(pipe.model)) == 0
    assert other.model.head.weight is other.model.tokens.weight


def test_stage_modules_made_by_hand():
    given = plain.case("mlp")
    losses, model = plain.trained(given)
    whole = given.fresh()
    pipe = Pipeline([whole[:5], whole[5:10], whole[10:]], example=given.example, loss=given.loss, optimizer=plain.adamw)
    assert [step.loss for step in pipe.train(given.batches)] == pytest.approx(losses, rel=1e-12)
    assert plain.off(plain.weights(whole), plain.weights(model)) < 1e-10


def test_train_is_lazy_and_numbers_its_steps():
    given = plain.case("mlp")
    pipe, asked = pipeline(given, optimizer=plain.adamw), []

    def loader():
        for at, batch in enumerate(given.batches):
            asked.append(at)
            yield batch

    for step in pipe.train(loader()):
        assert step.index == asked[-1]
        assert isinstance(step.loss, float)
        if step.index == 2:
            break
    assert asked == [0, 1, 2]


def test_without_a_loss_a_pipeline_still_runs_forward():
    given = plain.case("mlp")
    pipe = pipeline(given, loss=None)
    torch.testing.assert_close(pipe.forward(given.batches[0][0]), given.fresh()(given.batches[0][0]).detach())


def test_inputs_by_name_with_plain_values_beside_them():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x, scale=1.0, mask=None, mode="tanh"):
            x = getattr(torch, mode)(self.a(x)) * scale
            return self.b(x if mask is None else x * mask)

    torch.manual_seed(0)
    model, data = Named().to(F64), torch.randn(8, 6, dtype=F64)
    pipe = Pipeline(model, example={"x": data[:2]}, cuts=["b"], loss=F.mse_loss)
    mask = (torch.rand(8, 1) > 0.5).to(F64)
    calls = [{"x": data}, {"x": data, "scale": 2.0}, {"x": data, "mask": mask}, {"x": data, "mode": "sigmoid"}]
    for inputs in [*calls, *calls]:
        model.zero_grad()
        F.mse_loss(model(**inputs), data).backward()
        wanted = plain.gradients(model)
        model.zero_grad()
        pipe.step(inputs, data)
        assert plain.off(plain.gradients(model), wanted) < 1e-12


def test_a_list_of_stage_modules_in_chunks():
    """It once asked for as many ranks as there are modules: `expected 7 cuts for 8 pieces, but got 3`."""
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)]
    pipe = Pipeline(modules, example=torch.ones(1, 3), chunks=2, schedule="interleaved", loss=nn.functional.mse_loss)
    assert pipe.schedule.shape.placement == (0, 1, 0, 1)
    inputs, target = torch.randn(8, 3), torch.randn(8, 3)
    whole = nn.functional.mse_loss(nn.Sequential(*modules)(inputs), target)
    assert pipe.step(inputs, target).loss == pytest.approx(whole.item(), rel=1e-5)
