"""PipeDream (Narayanan et al. 2019): no flush, one update a mini-batch, weights stashed for the backward.

Stage s with r_s replicas runs floor((workers - 1 - sum of earlier r) / r_s) forwards ahead: of micro-batches in a plain
pipeline, of whole mini-batches where replicas take those in turns. `stash=True`: a forward uses the newest weights of
its stage and its backward the same version. `vertical_sync=True`: all stages use what the first stage had.
`stash=False`: both take what is newest, which is no gradient of any function; it is offered to show the harm.
"""

from __future__ import annotations

from penstock.core.loop import Loop
from penstock.core.shape import IntArray, Law, Shape, Sharing
from penstock.core.validation import truth
from penstock.errors import InputError
from penstock.schedules.ask import Ask
from penstock.schedules.asynchronous import endless


def pipedream(ask: Ask) -> Loop:
    stash = truth("stash", ask.options.get("stash", True))
    vertical = truth("vertical_sync", ask.options.get("vertical_sync", False))
    if vertical and not stash:
        raise InputError(
            "weight stashing where vertical_sync is on", "vertical_sync=True with stash=False", "leave stash on"
        )
    law = Law.VERTICAL if vertical else Law.STASH if stash else Law.NEWEST
    shape = ask.straight(law, Sharing.TURNS)
    warm = warm_up(shape)
    m = shape.microbatches

    def newest(rank: int, number: IntArray, t: IntArray) -> IntArray:
        return (t - warm[rank]) // m

    def input_stage(rank: int, number: IntArray, t: IntArray) -> IntArray:
        """The version that holds the mini-batches which the first stage's version held."""
        first = shape.replicas[0]
        t_first = number // m // first * m + number % m
        return (t_first - warm[0]) // m * first // shape.replicas[rank]

    if not stash:
        return endless(shape, warm, newest, lambda rank, number, t: t // m)
    rule = input_stage if vertical else newest
    return endless(shape, warm, rule, rule)


def warm_up(shape: Shape) -> list[int]:
    """Forwards that each stage runs ahead of its first backward.

    A later replica's first micro-batch comes a whole mini-batch after its neighbour's, so there the lead is counted in
    mini-batches: 1-2-1 with 3 micro-batches and a lead of 3, 1, 0 micro-batches would stand still.
    """
    workers, earlier, warm = shape.slots, 0, []
    unit = 1 if workers == shape.ranks else shape.microbatches
    for replicas in shape.replicas:
        warm.append((workers - 1 - earlier) // replicas * unit)
        earlier += replicas
    return warm
