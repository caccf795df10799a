"""What a trained model makes of text that it has not seen: its loss there, and a sample of what it writes.

Every rank runs these and gets the same.
"""

from __future__ import annotations

import torch

from penstock.app.data import TextData
from penstock.app.outcome import Validation
from penstock.app.pipeline import Pipeline
from penstock.app.task import Task
from penstock.errors import FormatError

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
