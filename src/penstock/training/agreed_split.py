"""One split on all ranks: rank 0 chooses the cuts, and the values that cross a cut are compared by name.

A forward may do the same things in another order on each rank, where it iterates over a set, say. Ranks then number
their values differently, and only the names identify them.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.engine.passage_words import other_forward
from penstock.errors import SplitError
from penstock.model.naming import name_of
from penstock.model.split import Cuts, Split
from penstock.training.processes import Crew

ROUNDS = 16  # of choosing cuts again


def agreed_split(crew: Crew, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], fixed: bool) -> Split:
    """The split with rank 0's cuts; where these are `fixed`, by a user or a plan, with them or not at all.

    Refuses ranks whose stages would exchange different values.
    """
    first, bad = crew.world.rank == 0, [0]
    avoid: frozenset[int] = frozenset()
    for _ in range(ROUNDS):
        opened, calls, before = crew.told([sorted(split.decided().opened), split.decided().calls, _before(split)], 0)
        cuts = Cuts(frozenset(opened), tuple((name, key) for name, key in calls))
        mine, bad = _compared(split, cuts, before, args, kwargs)
        every = [set(json.loads(part)) for part in crew.world.gather(json.dumps(bad).encode())]
        bad = sorted(set().union(*every))
        if not bad:
            assert mine is not None
            split = mine
            break
        if fixed:
            break
        avoid |= {calls[at][1] for at in bad}
        again = _chosen_again(split, avoid, args, kwargs) if first else None
        if not crew.told(again is not None, 0):
            break
        split = again or split
    if bad:
        raise other_forward(f"other calls before {calls[bad[0]][0]!r}")
    _require_same_exchange(crew, split)
    return split


def _before(split: Split) -> list[int]:
    """For every cut, one number of all that runs before it."""
    path = split.first
    names = [sorted(e.key for e in path.trace.events[:start] if not e.free) for start in path.starts[1:]]
    return [name_of(*some) for some in names]


def _compared(
    split: Split, cuts: Cuts, before: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Split | None, list[int]]:
    """The split with rank 0's cuts, and those cuts before which other things are called here."""
    if cuts != split.decided():
        try:
            split = Split(split.model, split.pieces, args, kwargs, cuts)
        except SplitError:
            return None, [at for at, (_, key) in enumerate(cuts.calls) if key not in split.first.trace.event_names] or [
                0
            ]
    mine = _before(split)
    return split, [at for at in range(len(mine)) if mine[at] != before[at]]


def _chosen_again(split: Split, avoid: frozenset[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split | None:
    try:
        return Split(split.model, split.pieces, args, kwargs, avoid=avoid)
    except SplitError:
        return None


def _require_same_exchange(crew: Crew, split: Split) -> None:
    every = [json.loads(part) for part in crew.world.gather(json.dumps(_exchanged(split)).encode())]
    for rank, theirs in enumerate(every):
        for name in every[0] | theirs:
            if every[0].get(name) != theirs.get(name):
                what = every[0].get(name) or theirs.get(name)
                raise other_forward(f"{what} on {'rank 0' if name in every[0] else f'rank {rank}'} alone")


def _exchanged(split: Split) -> dict[str, str]:
    """What crosses between stages, and which stage owns each parameter: what it is called, and what it is."""
    path = split.first
    found = {name: f"parameter {name!r} on stage {stage}" for name, stage in split.owner.items()}
    for stage, values in enumerate(path.incoming):
        for value, source in values.items():
            event = path.trace.events[path.trace.values[value].made_by]
            found[f"{path.trace.values[value].key}"] = f"{event.name!r} from stage {source} to {stage}"
    return found
