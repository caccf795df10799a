"""Validation and samples: those of a plain model with the same weights; what cannot be had is refused beforehand."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from penstock.app.config.file import build_config
from penstock.app.config.import_path import add_import_folders
from penstock.app.config.task import Task
from penstock.app.run.outcome import Outcome, Validation
from penstock.app.run.train import run
from penstock.app.run.validation import TEMPERATURE, sample, validate
from penstock.errors import InputError

pytestmark = pytest.mark.cpu_only
add_import_folders(Path(__file__).parent)
GPT = {"kind": "gpt", "width": 16, "heads": 2, "layers": 2, "length": 12, "dropout": 0.1}
OWN = {
    "model": {"factory": "broken:make_model", "arguments": {"careless": False}},
    "data": {"factory": "broken:make_batches", "validation": "broken:some_batches"},
    "training": {"steps": 2, "batch": 8, "loss": "mse", "plain_steps": 0},
}
TEXT = "\n".join(f"{number} plus {number + 1} is {2 * number + 1}" for number in range(400))


@pytest.fixture
def task(tmp_path):
    (tmp_path / "mine.txt").write_text(TEXT)

    def make(schedule="1f1b", **data):
        raw = {
            "model": GPT,
            "data": {"path": str(tmp_path / "mine.txt"), "validation": 0.17} | data,
            "pipeline": {"stages": 2, "microbatches": 4, "schedule": schedule},
            "optimizer": {"lr": 1e-2},
            "training": {"steps": 6, "batch": 8, "plain_steps": 0, "sample": 40},
        }
        return Task(build_config(raw, "test"))

    return make


def trained(task):
    """The pipeline after training, and a plain model with its weights."""
    pipe, model = task.pipeline(), task.model().eval()
    for _ in pipe.train(task.batches(0, 6)):
        pass
    model.load_state_dict(pipe.state_dict())
    return pipe, model


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_the_validation_loss_is_that_of_a_plain_model(task, schedule):
    given = task(schedule)
    pipe, model = trained(given)
    held_out = list(given.data.validation())
    inputs, target = (torch.cat([batch[at] for batch in held_out]) for at in (0, 1))
    assert len(inputs) % 8, "the last batch is smaller than the others, and counts for less"
    wanted = F.cross_entropy(model(inputs).flatten(0, 1), target.flatten()).item()
    found = validate(pipe, given)
    assert found.loss == pytest.approx(wanted, rel=1e-5)
    assert found.unigram_entropy == given.data.unigram_entropy()


def test_a_sample_is_what_a_plain_model_writes(task):
    """One that is only given what has been written so far, without anything behind it."""
    given = task()
    pipe, model = trained(given)
    source, written = torch.Generator().manual_seed(0), [given.data.alphabet.index("\n")]
    for _ in range(40):
        scores = model(torch.tensor([written[-12:]]))[0, -1].detach()
        written.append(int(torch.multinomial((scores / TEMPERATURE).softmax(-1), 1, generator=source)))
    assert sample(pipe, given) == given.data.text(torch.tensor(written[1:]))
    assert pipe.model.training


def test_a_run_says_validation_loss_and_sample(task):
    out = io.StringIO()
    outcome = run(task(), out)
    assert outcome.validation.loss < outcome.losses[0]
    assert len(outcome.sample) == 40
    first, validation, *rest = outcome.lines()
    assert first.startswith(f"loss {outcome.losses[0]:.4f} at first")
    assert validation == (
        f"validation loss {outcome.validation.loss:.4f} on held-out text, "
        f"whose unigram entropy is {outcome.validation.unigram_entropy:.4f}"
    )
    assert rest == ["a sample of what the model writes:", *outcome.sample.splitlines()]
    told = outcome.to_json()
    assert (told["validation"], told["sample"]) == (vars(outcome.validation), outcome.sample)


def test_held_out_batches_of_a_function():
    given = Task(build_config(OWN | {"pipeline": {"stages": 2}, "optimizer": {"name": "SGD", "lr": 0.1}}, "test"))
    outcome = run(given)
    model, total, count = given.model(), 0.0, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, target in given.batches(0, 2):
        F.mse_loss(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    for inputs, target in given.validation():
        total, count = total + F.mse_loss(model(inputs), target).item() * len(inputs), count + len(inputs)
    assert outcome.validation == Validation(pytest.approx(total / count, rel=1e-5))
    assert str(outcome.validation) == f"validation loss {outcome.validation.loss:.4f}"


def test_held_out_data_that_is_empty_is_refused_before_training():
    raw = OWN | {"data": OWN["data"] | {"validation": "broken:no_batches"}, "pipeline": {"stages": 2}}
    out = io.StringIO()
    with pytest.raises(InputError, match=r"data.validation: expected at least one held-out batch, but got none"):
        run(Task(build_config(raw | {"optimizer": {"name": "SGD", "lr": 0.1}}, "test")), out)
    assert out.getvalue() == ""


def test_a_sample_does_nothing_to_a_terminal():
    found = Outcome([], [], [], 0, 1, sample="a\x1b[2J\nb\r\t[bold]")
    assert found.lines() == ["a sample of what the model writes:", "a\ufffd[2J", "b", "\t[bold]"]
