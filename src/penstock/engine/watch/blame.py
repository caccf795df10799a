"""Who waits for whom: the report when a rank has waited for too long, and the rank that all the waiting leads to."""

from __future__ import annotations

from itertools import pairwise

from penstock.engine.watch.board import EVERYBODY, State
from penstock.engine.watch.failure import Failure
from penstock.engine.watch.sight import Sight


def blame(rank: int, peer: int, waited: float, sights: dict[int, Sight]) -> Failure:
    """One line, for every rank."""
    chain = _chain(rank, sights)
    last, silent = chain[-1], tuple(r for r, sight in sorted(sights.items()) if sight.silent)
    way = ", ".join(f"rank {a} waits for rank {b}" for a, b in pairwise(chain))
    whom = "all ranks" if peer == EVERYBODY else f"rank {peer}"
    cause = sights[last].describe(last) if last in sights else f"rank {last}: nothing is known of it"
    if len(set(chain)) < len(chain):
        cause = "they wait for each other"
    head = f"rank {rank} has waited {waited:.1f} s for {whom}, longer than the time-out"
    return Failure(last, f"{head}: {way + '; ' if way else ''}{cause}", silent)


def table(sights: dict[int, Sight], own_stack: str, rank: int) -> str:
    """What every rank is doing, and where in their Python code those are that can still say so."""
    lines = ["what each rank is doing:", *(f"  {sight.describe(r)}" for r, sight in sorted(sights.items()))]
    stacks = {r: sight.stack for r, sight in sorted(sights.items()) if sight.stack and r != rank and not sight.silent}
    for r, stack in {rank: own_stack, **stacks}.items():
        lines += [f"the main thread of rank {r} (innermost call last):", stack.rstrip("\n")]
    return "\n".join(lines) + "\n"


def _chain(rank: int, sights: dict[int, Sight]) -> list[int]:
    """From rank to rank along who waits for whom, to one that does not wait, or to one that was there already."""
    chain = [rank]
    while len(chain) == len(set(chain)) and chain[-1] in sights:
        sight = sights[chain[-1]]
        if sight.peer is None or sight.silent or sight.state in (State.DONE, State.FAILED):
            break
        chain.append(sight.peer if sight.peer != EVERYBODY else _late(chain[-1], sights))
        if chain[-1] == chain[-2]:
            return chain[:-1]
    return chain


def _late(rank: int, sights: dict[int, Sight]) -> int:
    """Whom a collective waits for: the rank that has come to the fewest, a silent one before others."""
    return min(sights, key=lambda r: (not sights[r].silent, sights[r].collectives, r == rank, r))
