"""Validation and sampling at the end of a run, and the bytes that a step sends between ranks."""

from __future__ import annotations

import torch

from penstock.app.config.data import TextData
from penstock.app.config.task import Task
from penstock.app.run.outcome import Validation
from penstock.errors import FormatError
from penstock.training.pipeline import Pipeline
from penstock.training.sharded_state import Shard

OPENING = "\n"  # the first token of a sample's prompt, where the text has it
TEMPERATURE = 0.7  # scores are divided by it, so that likely tokens are drawn more often


def require_validation(task: Task) -> None:
    """Raise, before the training, if there is no held-out data although the config asks for validation."""
    if task.config.data.validation is not None and next(task.validation(), None) is None:
        raise FormatError(
            "data.validation", "at least one held-out batch", "none", "let the function give (inputs, target)"
        )


def validate(pipe: Pipeline, task: Task) -> Validation | None:
    """Evaluate the held-out data, where the config has any."""
    if task.config.data.validation is None:
        return None
    data = task.data
    return Validation(pipe.evaluate(task.validation()), data.unigram_entropy() if isinstance(data, TextData) else None)


def sample(pipe: Pipeline, task: Task) -> str | None:
    """Generate as many tokens as the config asks for, each drawn from the model's scores for the next one.

    The context is as long as in training. Inputs always have that length, for which the model was split: what follows
    the last token does not affect a causal model.
    """
    data, count = task.data, task.config.training.sample
    if not count or not isinstance(data, TextData):
        return None
    source = torch.Generator("cpu").manual_seed(task.config.pipeline.seed)
    opening = data.alphabet.index(OPENING) if OPENING in data.alphabet else 0
    written, inputs = torch.tensor([opening], device="cpu"), torch.zeros(1, data.length, dtype=torch.long, device="cpu")
    pipe.model.eval()  # without dropout
    for _ in range(count):
        context = written[-data.length :]
        inputs[0, : len(context)] = context
        scores = pipe.forward(inputs)[0, len(context) - 1, : data.vocab].float().cpu()
        drawn = torch.multinomial((scores / TEMPERATURE).softmax(-1), 1, generator=source)
        written = torch.cat([written, drawn])
    pipe.model.train()
    return data.text(written[1:])


def traffic(pipe: Pipeline, rows: int) -> int:
    """Return the bytes of a batch of `rows` rows: activations, their gradients, gradients and weights of tied
    parameters, and the sums of gradients over replicas.

    The example's micro-batch is measured and scaled to the rows of the batch. Replicas divide it, but a value that has
    no rows goes to each.
    """
    split, home = pipe.split, pipe.schedule.shape.stage_rank
    path = split.first
    crossing = 0
    for stage, incoming in enumerate(path.incoming):
        for value, source in incoming.items():
            if home[stage] != home[source]:
                info = path.trace.values[value]
                copies = pipe.ranks.replicas[stage] if _without_rows(pipe, info.key) else 1
                crossing += info.bytes * copies * (2 if info.grad else 1)
    example = max(1, rows // pipe.microbatches)
    return int(crossing * rows / example) + _tied(pipe) + _summed(pipe)


def _without_rows(pipe: Pipeline, key: int) -> bool:
    """Return whether a value has been found to be the same for all rows."""
    if pipe.context.rows is None or pipe.schedule.shape.turns:  # where each has whole mini-batches
        return False
    dimensions = pipe.context.rows.dimensions.known
    return key in dimensions and dimensions[key].dimension is None


def _tied(pipe: Pipeline) -> int:
    """Return the bytes of tied weights, for every other rank that uses one: a gradient to each replica of the owner,
    and a weight back to each of the user."""
    split, shape = pipe.split, pipe.schedule.shape
    named, total = dict(split.model.named_parameters()), 0
    for name, owner in split.owner.items():
        home = shape.placement[owner]
        users = {shape.placement[stage] for stage in range(split.pieces) if name in split.uses(stage)} - {home}
        ways = sum(shape.replicas[home] + shape.replicas[user] for user in users)
        total += ways * named[name].numel() * named[name].element_size()
    return total


def _summed(pipe: Pipeline) -> int:
    """Return the bytes of the sums over replicas: of n, each but one sends every gradient once and gets it once. With
    the optimizer's state divided, the weights go as far; with the gradients divided, in place of one of the two.
    Replicas that take turns sum once in as many mini-batches as there are of them."""
    ways, total, turns = 3 if pipe.options.shard == Shard.OPTIMIZER else 2, 0, pipe.schedule.shape.turns
    for stage, replicas in enumerate(pipe.ranks.replicas):
        trained = [parameter for parameter in pipe.split.used(stage) if parameter.requires_grad]
        moved = ways * (replicas - 1) * sum(one.numel() * one.element_size() for one in trained)
        total += moved // replicas if turns else moved
    return total
