"""Ranks train micro-batches with unequal counts of ignored tokens as one process trains the whole batch."""

from __future__ import annotations

import pytest
import torch
import weights_rank

import plain
from ranks import launched

SCRIPT = weights_rank.__file__


def whole(name: str) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Losses and weights of plain training, and the mean over all tokens of all batches afterwards."""
    case = weights_rank.CASES[name]
    model, batches = case.model(), weights_rank.batches(case)
    optimizer, losses = weights_rank.descent(model.parameters()), []

    def score(x, y):
        return case.loss(model(**x) if case.inside else model(x), y)

    for x, y in batches:
        loss = score(x, y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    labels = [x["labels"][:, 1:] if case.inside else y for x, y in batches]
    counts = [int((y >= 0).sum()) for y in labels]
    if name in ("beside another", "two scalars"):  # other terms are means over rows, of which all batches have as many
        counts = [1] * len(counts)
    mean = sum(score(x, y).item() * count for (x, y), count in zip(batches, counts, strict=True)) / sum(counts)
    return losses, mean, model.state_dict()


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_weights_and_evaluation_are_those_of_the_whole_batch(ranks, tmp_path):
    file = tmp_path / "found.pt"
    with launched(tmp_path, ranks, str(file), script=SCRIPT) as run:
        assert run.wait(300) == 0, run.said
    found = torch.load(file, weights_only=True)
    assert len(found) == 2 * len(weights_rank.CASES)
    for (name, schedule), ours in found.items():
        losses, mean, weights = whole(name)
        assert ours["losses"] == pytest.approx(losses, abs=1e-12), (name, schedule)
        assert ours["evaluated"] == pytest.approx(mean, abs=1e-12), (name, schedule)
        assert plain.off(ours["weights"], weights) < 1e-12, (name, schedule)


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (4, "zb-h1"), (2, "2bw")])
def test_a_mean_of_the_users_own_is_refused_in_the_batch_that_has_ignored_tokens_first(ranks, schedule, tmp_path):
    with launched(tmp_path, ranks, "refused", schedule, script=SCRIPT) as run:
        assert run.wait(100) == 1, run.said
    assert "weighs rows by -100 in the target, of which micro-batches have 5, 0, 0, 0" in run.said
    assert "return (sum, weight)" in run.said
