"""Losses of stages with replicas: ignored tokens, sums with weights, labels inside the forward."""

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
from replicated import agree

torch.set_num_threads(1)
F64 = torch.float64
LOSSES = {
    "mean over counted targets": plain.mean_token_loss,
    "class weights": lambda out, target: F.cross_entropy(
        out.flatten(0, 1), target.flatten(), ignore_index=plain.IGNORED,
        weight=torch.linspace(0.5, 2.0, plain.WORDS, dtype=F64),
    ),
    "two means": lambda out, target: plain.mean_token_loss(out, target) + 0.1 * out.square().mean(),
}  # fmt: skip


def uneven(rows: int) -> tuple[Tensor, Tensor]:
    """Rows count six tokens or hardly any; those of the last two count none."""
    return plain.with_ignored(rows)


def gpt() -> nn.Module:
    torch.manual_seed(3)
    return plain.GPT(layers=4).to(F64)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(
    ("replicas", "schedule"),
    [([2], "1f1b"), ([2, 1], "zb-h1"), ([1, 3], "1f1b"), ([2, 2], "gpipe"), ([2, 1, 2], "zb-v")],
)
def test_ignored_tokens_of_which_each_replica_has_another_count(kind, replicas, schedule):
    model = gpt()
    batches = [uneven(12), (plain.tokens(12), plain.tokens(12)), uneven(9), uneven(12), uneven(16)]
    agree(plain.Case(model, LOSSES[kind], batches), replicas, schedule=schedule, microbatches=6)


@pytest.mark.parametrize("replicas", [[2], [2, 1], [1, 3], [2, 3]], ids=str)
def test_sum_and_weight(replicas):
    model = gpt()
    batches = [uneven(12), uneven(9), (plain.tokens(7), plain.tokens(7)), uneven(12), uneven(16)]
    whole = plain.trained(plain.Case(model, plain.mean_token_loss, batches))
    agree(plain.Case(model, plain.counted_token_loss, batches), replicas, whole)


@pytest.mark.parametrize("replicas", [[2, 1], [1, 3]], ids=str)
def test_accumulated_steps_weigh_by_what_they_count(replicas):
    model, batches = gpt(), [uneven(12), (plain.tokens(12), plain.tokens(12))]
    whole = copy.deepcopy(model)
    joined = [torch.cat([batch[side] for batch in batches]) for side in (0, 1)]
    plain.backward(whole, plain.mean_token_loss, *joined)
    for loss in (plain.counted_token_loss, plain.mean_token_loss):
        pipe = Pipeline(
            copy.deepcopy(model), example=batches[0][0][:2], stages=len(replicas), replicas=replicas, loss=loss,
            accumulate=2,
        )  # fmt: skip
        for batch in batches:
            pipe.step(*batch)
        assert plain.off(plain.gradients(pipe.model), plain.gradients(whole)) < 1e-12


def in_float64(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """The library's loss of causal models, without its cast to float32, in which 1e-10 cannot be seen."""
    ahead = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.view(-1, vocab_size), ahead)


def transformer(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=40, n_embd=16, n_layer=4, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config).double()
    else:
        config = transformers.LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16, use_cache=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).double()
        for name, norm in {n: m for n, m in model.named_modules() if n.endswith("norm")}.items():
            model.set_submodule(name, nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=F64))
    model.loss_function = in_float64
    return model


def labelled(ignored: list[int], rows: int, padded: bool, length: int = 7) -> dict[str, Tensor]:
    """So many of each row's first labels are ignored; a mask leaves out as many of its last tokens as its number."""
    ids = torch.randint(0, 40, (rows, length))
    labels = ids.clone()
    for row, count in enumerate(ignored):
        labels[row, :count] = -100
    given = {"input_ids": ids, "labels": labels}
    if padded:
        mask = torch.ones_like(ids)
        for row in range(rows):
            mask[row, length - row % 3 :] = 0
        given["attention_mask"] = mask
    return given


def descent(parameters: Any) -> torch.optim.Optimizer:
    """AdamW would blow up the bias of GPT-2's keys, whose gradient is rounding alone."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


@pytest.mark.parametrize(
    ("kind", "padded", "replicas", "schedule"),
    [
        ("gpt2", False, [2, 1], "1f1b"), ("gpt2", True, [1, 3], "zb-h1"), ("gpt2", True, [2, 1, 2], "gpipe"),
        ("llama", True, [2, 1], "1f1b"), ("llama", False, [1, 3], "zb-h1"), ("llama", True, [2, 2], "zb-v"),
    ],
)  # fmt: skip
def test_a_model_of_transformers_with_labels_inside(kind, padded, replicas, schedule):
    model = transformer(kind)
    torch.manual_seed(1)
    batches = [
        labelled([], 12, padded), labelled([1, 0, 6, 7, 7, 7, 2, 4], 12, padded), labelled([5], 9, padded),
        labelled([7, 7, 7, 7, 7, 7, 1], 12, padded), labelled([], 12, padded),
    ]  # fmt: skip
    whole = copy.deepcopy(model)
    optimizer, losses = descent(whole.parameters()), []
    for given in batches:
        loss = whole(**given).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    example = {name: value[:2] for name, value in batches[0].items()}
    pipe = Pipeline(
        model, example=example, stages=len(replicas), microbatches=6 if len(replicas) == 3 else 4, schedule=schedule,
        replicas=replicas, loss=lambda out, _: out.loss, optimizer=descent,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [pipe.step(given).loss for given in batches]
    assert found == pytest.approx(losses, abs=1e-10)
    assert plain.off(plain.weights(model), plain.weights(whole)) < 1e-10
