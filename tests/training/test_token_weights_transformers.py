"""Labels inside the forward of models of the transformers library, with unequal counts of ignored ones."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plain
from penstock import Pipeline

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
WORDS = 40


def in_float64(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """The library's loss of causal models, without its cast to float32, in which 1e-12 cannot be seen."""
    ahead = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.view(-1, vocab_size), ahead)


def llama(exact: bool = True) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    if exact:
        model.loss_function = in_float64
        norms = {name: module for name, module in model.named_modules() if name.endswith("norm")}
        for name, norm in norms.items():  # the library's own cast to float32, too
            fresh = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=torch.float64)
            model.set_submodule(name, fresh)
    return model


def batch(ignored: list[int], seed: int, rows: int = 8, length: int = 7) -> dict[str, Tensor]:
    """So many of each row's first labels are ignored."""
    torch.manual_seed(seed)
    ids = torch.randint(0, WORDS, (rows, length))
    labels = ids.clone()
    for row, count in enumerate(ignored):
        labels[row, :count] = -100
    return {"input_ids": ids, "labels": labels}


FULL, FIVE, UNEQUAL = [], [5], [1, 0, 6, 7, 7, 7, 2, 4]  # the third micro-batch has nothing to count


def descent(parameters: Any) -> torch.optim.Optimizer:
    """AdamW would blow up what is rounded."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def trained(model: nn.Module, batches: list[Any]) -> tuple[list[float], nn.Module]:
    whole = copy.deepcopy(model)
    optimizer, losses = descent(whole.parameters()), []
    for given in batches:
        loss = whole(**given).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, whole


@pytest.mark.parametrize(("exact", "to"), [(True, 1e-12), (False, 1e-6)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_fresh_llama(exact, to, schedule):
    model = llama(exact)
    batches = [batch(FULL, 1), batch(FIVE, 2), batch(UNEQUAL, 3)]
    losses, whole = trained(model, batches)
    example = {name: value[:2] for name, value in batches[0].items()}
    pipe = Pipeline(
        model, example=example, stages=2, microbatches=4, schedule=schedule, loss=lambda out, _: out.loss,
        optimizer=descent,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [pipe.step(given).loss for given in batches]
    assert found == pytest.approx(losses, abs=to)
    assert plain.off(plain.weights(model), plain.weights(whole)) < to


@pytest.mark.parametrize("items", ["number", "tensor"])
def test_the_number_of_items_that_a_trainer_gives(items):
    model, given = llama(exact=False), batch(UNEQUAL, 3)
    count = (given["labels"][:, 1:] >= 0).sum() * 2  # of two batches, say
    given = {**given, "num_items_in_batch": count if items == "tensor" else int(count)}
    whole = copy.deepcopy(model)
    loss = whole(**given).loss
    loss.backward()
    example = {name: value[:2] if isinstance(value, Tensor) and value.dim() else value for name, value in given.items()}
    pipe = Pipeline(model, example=example, stages=2, microbatches=4, loss=lambda out, _: out.loss)
    assert pipe.step(given).loss == pytest.approx(loss.item(), rel=1e-6)
    assert plain.off(plain.gradients(model), plain.gradients(whole)) < 1e-6


def test_questions_with_answers_outside_of_their_text():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForQuestionAnswering(config).double()
    given = {
        "input_ids": torch.randint(0, WORDS, (8, 7)),
        "attention_mask": torch.ones(8, 7, dtype=torch.long),
        "start_positions": torch.tensor([1, 2, 9, 9, 3, 4, 9, 0]),
        "end_positions": torch.tensor([2, 9, 9, 9, 3, 6, 9, 1]),
    }
    whole = copy.deepcopy(model)
    loss = whole(**given).loss
    loss.backward()
    example = {name: value[:2] for name, value in given.items()}
    pipe = Pipeline(model, example=example, stages=2, microbatches=4, loss=lambda out, _: out.loss)
    assert pipe.step(given).loss == pytest.approx(loss.item(), abs=1e-12)
    found, wanted = plain.gradients(model), plain.gradients(whole)
    nothing = ("key.bias", "3.output.LayerNorm.bias", "qa_outputs.bias")  # no gradient but rounding
    left_out = {name for name in wanted if name.endswith(nothing)}
    assert plain.off(found, wanted, left_out) < 1e-12
