"""Validate and sample while a run trains, and count the bytes that a step sends between ranks."""

from __future__ import annotations

import torch

from penstock.app.config.data import TextData
from penstock.app.config.task import Task
from penstock.app.run.outcome import Validation
from penstock.errors import FormatError
from penstock.training.pipeline import Pipeline

OPENING = "\n"  # what a sample begins after, where the text has it: a line's end
TEMPERATURE = 0.7  # scores are divided by it: likely tokens are drawn more often than the model says


def require_validation(task: Task) -> None:
    """Found out before the training, not after it: held-out data that has been asked for is there."""
    if task.config.data.validation is not None and next(task.validation(), None) is None:
        raise FormatError(
            "data.validation", "at least one held-out batch", "none", "let the function give (inputs, target)"
        )


def validate(pipe: Pipeline, task: Task) -> Validation | None:
    """Score the held-out data, where the config has any."""
    if task.config.data.validation is None:
        return None
    data = task.data
    return Validation(pipe.evaluate(task.validation()), data.unigram_entropy() if isinstance(data, TextData) else None)


def sample(pipe: Pipeline, task: Task) -> str | None:
    """Let the model write as many tokens as the config asks for, each drawn from its scores for the next one.

    It sees as much as it was trained on at once. Inputs always have that length, which the model was split for: what
    stands behind the last token changes nothing in a model that looks back alone.
    """
    data, count = task.data, task.config.training.sample
    if not count or not isinstance(data, TextData):
        return None
    source = torch.Generator("cpu").manual_seed(task.config.pipeline.seed)
    opening = data.alphabet.index(OPENING) if OPENING in data.alphabet else 0
    written, inputs = torch.tensor([opening], device="cpu"), torch.zeros(1, data.length, dtype=torch.long, device="cpu")
    pipe.model.eval()  # dropout has no place here
    for _ in range(count):
        seen = written[-data.length :]
        inputs[0, : len(seen)] = seen
        scores = pipe.forward(inputs)[0, len(seen) - 1, : data.vocab].float().cpu()
        drawn = torch.multinomial((scores / TEMPERATURE).softmax(-1), 1, generator=source)
        written = torch.cat([written, drawn])
    pipe.model.train()
    return data.text(written[1:])


def traffic(pipe: Pipeline, rows: int) -> int:
    """Of a batch of so many rows: activations on their way, gradients back, and what tied weights exchange.

    The example's micro-batch is measured and taken for all, in proportion to its rows.
    """
    split, home = pipe.split, pipe.schedule.shape.stage_rank
    path = split.first
    crossing = 0
    for stage, incoming in enumerate(path.incoming):
        for value, source in incoming.items():
            if home[stage] != home[source]:
                known = path.trace.values[value]
                crossing += known.bytes * (2 if known.grad else 1)
    example = max(1, rows // pipe.microbatches)
    return int(crossing * rows / example) + _tied(pipe)


def _tied(pipe: Pipeline) -> int:
    """A gradient to the owner and a weight back, for every other rank that uses it."""
    split, home = pipe.split, pipe.schedule.shape.stage_rank
    named, total = dict(split.model.named_parameters()), 0
    for name, owner in split.owner.items():
        users = {int(home[stage]) for stage in range(split.pieces) if name in split.uses(stage)} - {int(home[owner])}
        total += 2 * len(users) * named[name].numel() * named[name].element_size()
    return total
