"""torch's TransformerEncoder in eval mode: it may pack rows without their padding, and its results there are zeros."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from distributed import brought
from distributed.brought import Encoded, squares, texts
from penstock import Pipeline

torch.set_num_threads(1)
NEAR = 1e-12
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # the plain model's


def pipeline(model: nn.Module, stages: int, example: tuple) -> Pipeline:
    return Pipeline(copy.deepcopy(model), example=example, stages=stages, microbatches=2, loss=squares)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("which", ["behind", "before", "none"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("checked", [True, False])
def test_a_forward_and_an_evaluation_have_the_numbers_of_the_plain_model(stages, which, norm, checked):
    if which == "before" and not checked:
        pytest.skip("torch then takes words for padding")
    torch.manual_seed(2)
    model, given = Encoded(norm=norm, checked=checked).eval(), texts(which)
    pipe = pipeline(model, stages, tuple(part[:2] for part in given))
    with torch.no_grad():
        wanted = model(*given)
    assert (pipe.forward(given) - wanted).abs().max() < NEAR
    assert pipe.evaluate([(given, None)]) == pytest.approx(squares(wanted, None).item(), abs=NEAR)
    assert len(wanted.flatten(0, 1)[texts("behind")[1].flatten()].unique(dim=0)) == 1 or which != "behind"  # it packs


def test_a_mask_of_numbers():
    torch.manual_seed(2)
    ids, padding = texts("behind")
    given = (ids, torch.zeros(padding.shape, dtype=torch.float64).masked_fill(padding, -torch.inf))
    model = Encoded().eval()
    with torch.no_grad():
        wanted = model(*given)
    pipe = pipeline(model, 2, tuple(part[:2] for part in given))
    assert (pipe.forward(given) - wanted).abs().max() < NEAR


def test_a_frozen_encoder_in_eval_mode_packs_while_what_is_behind_it_trains():
    torch.manual_seed(2)
    model, given = Encoded().eval(), texts("behind")
    for part in (model.table, model.encoder):
        part.requires_grad_(False)
    pipe = pipeline(model, 2, tuple(part[:2] for part in given))
    found = pipe.step(given).loss
    loss = squares(model(*given), None)
    loss.backward()
    assert found == pytest.approx(loss.item(), abs=NEAR)
    for mine, wanted in zip(pipe.model.head.parameters(), model.head.parameters(), strict=True):
        assert (mine.grad - wanted.grad).abs().max() < NEAR


def test_an_encoder_inside_torchs_transformer():
    class Translation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 8, dtype=torch.float64)
            self.both = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)

        def forward(self, ids, padding):
            x = self.table(ids)
            return self.both(x, x, src_key_padding_mask=padding, memory_key_padding_mask=padding)

    torch.manual_seed(2)
    model, given = Translation().eval(), texts("behind")
    with torch.no_grad():
        wanted = model(*given)
    for stages in (2, 3):
        pipe = pipeline(model, stages, tuple(part[:2] for part in given))
        assert (pipe.forward(given) - wanted).abs().max() < NEAR


def test_a_model_is_as_it_was():
    torch.manual_seed(2)
    model, given = Encoded().eval(), texts("behind")
    pipe = Pipeline(model, example=tuple(part[:2] for part in given), stages=2, microbatches=2, loss=squares)
    before = model.encoder.norm
    pipe.forward(given)
    assert model.encoder.norm is before
    assert model.encoder.use_nested_tensor is True
    assert "norm" not in vars(model.encoder)


def test_training_and_evaluation_in_turn_have_the_numbers_of_plain_training():
    torch.manual_seed(1)
    model, losses = Encoded(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(which: str) -> None:
        loss = squares(model(*texts(which)), None)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step("behind")
    model.eval()
    with torch.no_grad():
        results = [model(*texts(which)) for which in ("behind", "before", "none")]
    losses += [squares(result, None).item() for result in results]
    model.train()
    step("before")
    found = brought.encoder(2)
    assert found["losses"] == pytest.approx(losses, abs=NEAR)
    assert torch.allclose(torch.tensor(found["results"], dtype=torch.float64), torch.stack(results), rtol=0, atol=NEAR)
