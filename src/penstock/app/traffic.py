"""Bytes that a step sends between ranks, counted from what crosses the cuts."""

from __future__ import annotations

from penstock.app.pipeline import Pipeline


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
