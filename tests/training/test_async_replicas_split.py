"""2bw with replicas that split each micro-batch: the recursion of 2bw, whatever the replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
import recursion_models
from penstock import InputError
from segments import ADAMW, MOMENTUM, SGD, WITHIN, Method, Recursion, off, pipeline, trained, weights

torch.set_num_threads(1)

MODELS = {
    "chain": lambda n: recursion_models.chain(n, width=3),
    "conv": lambda n: recursion_models.conv_net(n, channels=2, side=3),
    "gpt": lambda n: recursion_models.gpt(n, tied=False, width=4, length=3),
}


def agree(pipe: Any, reference: Recursion, batches: list) -> None:
    losses = reference.run(batches)
    assert trained(pipe, batches) == pytest.approx(losses, abs=WITHIN)
    assert off(weights(pipe), reference.weights()) < WITHIN


@pytest.mark.parametrize("rule", [SGD, MOMENTUM, ADAMW], ids=["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("replicas", [[2], [2, 1], [1, 2]], ids=str)
def test_the_recursion_over_forty_mini_batches(replicas, rule):
    model, method = MODELS["chain"](len(replicas)), Method("2bw", 2)
    agree(pipeline(model, method, rule, replicas=replicas), Recursion(model, method, rule), model.batches(40, rows=8))


@pytest.mark.parametrize(
    ("kind", "replicas", "m", "rows"),
    [
        ("conv", [2, 2, 1], 3, 7),
        ("gpt", [2, 3], 4, 13),
        ("chain", [1, 3, 2], 3, 11),
        ("gpt", [3, 1], 2, 6),
        ("chain", [4], 3, 12),
    ],
    ids=str,
)
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_unequal_rows_and_replicas(kind, replicas, m, rows, recompute):
    model, method = MODELS[kind](len(replicas)), Method("2bw", m)
    pipe = pipeline(model, method, ADAMW, replicas=replicas, recompute=recompute)
    agree(pipe, Recursion(model, method, ADAMW), model.batches(11, rows=rows))


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize(
    ("kind", "replicas"),
    [
        ("tied gpt", [2, 1]),
        ("tied gpt", [1, 2]),
        ("tied gpt", [2, 3]),
        ("tied gpt", [2, 1, 2]),
        ("tied chain", [1, 2, 1]),
        ("tied chain", [2, 2, 1]),
        ("tied chain", [3, 1, 2, 1]),
    ],
    ids=str,
)
def test_tied_weights_of_stages_with_replicas(kind, replicas, clip):
    """The owner adds the sums of all stages, and all replicas follow its versions."""
    n, method = len(replicas), Method("2bw", 4)
    model = {
        "tied gpt": lambda: recursion_models.gpt(n, width=4, length=3),
        "tied chain": lambda: recursion_models.chain(n, width=3, tied=(0, n - 2)),
    }[kind]()
    reference = Recursion(model, method, ADAMW, clip=clip)
    pipe = pipeline(model, method, ADAMW, replicas=replicas, clip=clip)
    for length in (9, 2):
        agree(pipe, reference, model.batches(length, rows=13, seed=length))


@pytest.mark.parametrize("clip", [0.05, 0.3])
@pytest.mark.parametrize(
    ("kind", "replicas", "m"),
    [("chain", [2, 1], 2), ("gpt", [1, 2], 3), ("conv", [1, 3, 2], 3), ("chain", [2], 1), ("chain", [2, 1, 1, 2], 4)],
    ids=str,
)
def test_clipping_is_over_all_stages(kind, replicas, m, clip):
    """The norm is passed in some mini-batches and not in others; runs of every length drain."""
    model, method = MODELS[kind](len(replicas)), Method("2bw", m)
    reference = Recursion(model, method, ADAMW, clip=clip)
    pipe = pipeline(model, method, ADAMW, replicas=replicas, clip=clip)
    for length in (1, 2, 3, 9):
        agree(pipe, reference, model.batches(length, rows=11, seed=length))
    steps = [pipe.step(*batch) for batch in model.batches(2, rows=5)]
    assert [step.loss for step in steps] == pytest.approx(
        [reference.step(batch) for batch in model.batches(2, rows=5)], abs=WITHIN
    )
    assert all(step.gradient_norm > 0 for step in steps)
    assert off(weights(pipe), reference.weights()) < WITHIN


def test_gradients_that_are_no_numbers_are_told_with_clipping():
    model = MODELS["chain"](2)
    pipe = pipeline(model, Method("2bw", 2), SGD, replicas=[2, 1], clip=1.0)
    model.module[0][0].weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(InputError, match="finite"):
        trained(pipe, model.batches(5, rows=4))


def test_mini_batches_of_few_rows_in_the_stream_and_at_its_end():
    """Some replicas have no row of a micro-batch, and some micro-batches have none at all."""
    model, method, rows = MODELS["chain"](2), Method("2bw", 4), [8, 2, 3, 8, 5, 2]
    batches = [(x[:n], y[:n]) for (x, y), n in zip(model.batches(6, rows=8), rows, strict=True)]
    agree(pipeline(model, method, MOMENTUM, replicas=[2, 1]), Recursion(model, method, MOMENTUM), batches)


def test_a_batch_with_fewer_rows_than_replicas_is_refused():
    model = MODELS["chain"](2)
    pipe = pipeline(model, Method("2bw", 2), SGD, replicas=[3, 1])
    with pytest.raises(InputError, match="a batch of at least 3 rows, one for each replica, but got 2"):
        trained(pipe, model.batches(1, rows=2))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.block(self.enter(ids))))


def tokens_pipeline(replicas: list[int]) -> penstock.Pipeline:
    torch.manual_seed(0)
    return penstock.Pipeline(
        Tokens().double(), example=torch.zeros(2, 3, dtype=torch.long), stages=2, cuts=["head"], schedule="2bw",
        microbatches=2, replicas=replicas, optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        loss=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()),
    )  # fmt: skip


@pytest.mark.parametrize("replicas", [[2, 1], [1, 2], [2, 2], [3, 2]], ids=str)
def test_ignored_tokens_and_a_replica_with_nothing_to_score(replicas):
    """Each token counts alike, wherever it is scored."""
    torch.manual_seed(1)
    batches = []
    for number in range(8):
        ids = torch.randint(0, 7, (8, 3))
        target = ids.where(torch.rand(8, 3) < 0.6, -100)
        if number > 3:
            target[:2] = -100  # the first replica's part of the first micro-batch
        batches.append((ids, target))
    pipe, plain = tokens_pipeline(replicas), tokens_pipeline([1, 1])
    expected = trained(plain, batches)
    assert trained(pipe, batches) == pytest.approx(expected, abs=WITHIN)
    assert off(weights(pipe), weights(plain)) < WITHIN
    assert len(set(expected)) == 8


def test_batch_norm_s_averages_are_those_of_the_whole_mini_batch():
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2))).double()
    inputs = torch.randn(8, 3).double()
    with torch.no_grad():
        seen = module[0][0](inputs)
    pipe = penstock.Pipeline(
        module, example=inputs, stages=2, cuts=["1"], schedule="2bw", microbatches=2, replicas=[2, 1],
        loss=F.mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.0), verify=False,
    )  # fmt: skip
    list(pipe.train([(inputs, inputs)] * 3))
    norm = module[0][1]
    left = 0.9**3
    assert int(norm.num_batches_tracked) == 3
    assert torch.allclose(norm.running_mean, (1 - left) * seen.mean(0), atol=WITHIN)
    assert torch.allclose(norm.running_var, left + (1 - left) * seen.var(0), atol=WITHIN)


def test_an_evaluation_and_a_checkpoint_in_the_loop(tmp_path):
    model, method = MODELS["chain"](2), Method("2bw", 2)
    pipe, reference = pipeline(model, method, ADAMW, replicas=[2, 1]), Recursion(model, method, ADAMW)
    batches, losses = model.batches(14, rows=4), []
    for record in pipe.train(batches):
        losses.append(record.loss)
        if record.index in (4, 9):
            pipe.evaluate(batches[:1])
            pipe.save(tmp_path / f"{record.index}")
    assert pipe.index == 14
    again = pipeline(MODELS["chain"](2), method, ADAMW, replicas=[1, 1])
    again.load(tmp_path / "4")
    expected = reference.run(batches[: again.index])
    second = pipeline(MODELS["chain"](2), method, ADAMW, replicas=[2, 1])
    second.load(tmp_path / "9")
    expected += reference.run(batches[again.index : second.index])
    expected += reference.run(batches[second.index :])
    assert 4 < again.index <= 9 < second.index <= 14
    assert losses == pytest.approx(expected, abs=WITHIN)
    assert off(weights(pipe), reference.weights()) < WITHIN


def test_a_single_step_is_a_synchronous_one():
    model = MODELS["chain"](2)
    pipe, reference = pipeline(model, Method("2bw", 2), ADAMW, replicas=[2, 1]), Recursion(model, Method("1f1b"), ADAMW)
    batches = model.batches(3, rows=5)
    steps = [pipe.step(*batch).loss for batch in batches]
    assert steps == pytest.approx([reference.step(batch) for batch in batches], abs=WITHIN)
    assert off(weights(pipe), reference.weights()) < WITHIN


def test_a_switch_to_replicas_that_take_turns_needs_a_pipeline_made_for_it():
    model = MODELS["chain"](2)
    pipe = pipeline(model, Method("2bw", 2), SGD, replicas=[2, 2])
    with pytest.raises(InputError, match="whose replicas split micro-batches, as this pipeline was made for"):
        pipe.switch("pipedream", microbatches=1)
    trained(pipe, model.batches(3, rows=4))  # it goes on


def test_a_switch_from_turns_to_split_and_to_synchronous_training():
    model = MODELS["chain"](2)
    pipe = pipeline(model, Method("pipedream"), MOMENTUM, replicas=[2, 1])
    reference = Recursion(model, Method("2bw", 2), MOMENTUM)
    batches = model.batches(10, rows=4)
    pipe.switch("2bw", microbatches=2)
    agree(pipe, reference, batches[:6])
    pipe.switch("1f1b", microbatches=2)
    for batch in batches[6:]:
        assert pipe.step(*batch).loss == pytest.approx(reference.step(batch), abs=WITHIN)
    assert off(weights(pipe), reference.weights()) < WITHIN


@pytest.mark.parametrize("replicas", [[2, 1], [1, 2], [1, 3]], ids=str)
def test_a_loss_that_weighs_its_rows_and_does_not_say_so_is_refused(replicas):
    """In mid-flight: labels to be ignored come first in the sixth mini-batch, in the part of the last replica."""
    torch.manual_seed(0)

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scored = target >= 0
        every = (out.gather(-1, target.clamp(0)[..., None])[..., 0] - out.logsumexp(-1)) * scored
        return -every.sum() / scored.sum()

    batches = [(torch.randint(0, 7, (12, 3)), torch.randint(0, 7, (12, 3))) for _ in range(9)]
    batches[5][1][9:, 1:] = -100
    pipe = penstock.Pipeline(
        Tokens().double(), example=batches[0][0], stages=2, cuts=["head"], schedule="2bw", microbatches=2,
        replicas=replicas, optimizer=lambda params: torch.optim.SGD(params, lr=0.5), loss=loss,
    )  # fmt: skip
    losses: list[float] = []
    with pytest.raises(InputError, match=r"a loss that is a mean over rows, or \(sum, weight\)"):
        losses += (step.loss for step in pipe.train(batches))
    assert len(losses) < 6
