"""Batches that are dicts of the forward's keywords, labels among them, are taken as they come from a DataLoader."""

from __future__ import annotations

import pytest
import torch

from distributed import brought
from penstock import InputError, Pipeline

torch.set_num_threads(1)


def test_training_and_evaluation_have_the_numbers_of_plain_training():
    model, loader, losses = brought.language_model(), list(brought.dict_loader()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in (*loader, loader[1]):
        loss = model(**batch).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        scored = [(model(**batch).loss.item(), len(batch["labels"])) for batch in loader]
        losses.append(sum(loss * rows for loss, rows in scored) / sum(rows for _, rows in scored))
    found = brought.dicts(2)
    assert [len(batch["labels"]) for batch in loader] == [4, 4, 3]
    for mine in found:
        assert mine[:-1] == pytest.approx(losses, rel=2e-6)  # transformers takes the loss in float32
    assert found[0] == found[1]


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_loader_of_something_else_is_told_of_both_ways(schedule):
    pipe = Pipeline(
        torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(2))), example=torch.ones(1, 3), stages=2,
        schedule=schedule, microbatches=2, loss=lambda out, target: out.mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )  # fmt: skip
    with pytest.raises(
        InputError, match=r"a loader of \(inputs, target\), but got Tensor; yield a pair, .*or a dict of"
    ):
        list(pipe.train([torch.ones(4, 3)]))
    list(pipe.train([{"input": torch.ones(4, 3)}, ({"input": torch.ones(4, 3)}, None)]))
    assert pipe.index == 2
