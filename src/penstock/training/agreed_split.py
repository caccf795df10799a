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
from penstock.training.processes import Ranks

ROUNDS = 16  # attempts to choose cuts that all ranks have


def agreed_split(ranks: Ranks, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], fixed: bool) -> Split:
    """Return the split with rank 0's cuts. Cuts that are `fixed`, by a user or a plan, are used or refused.

    Raise for ranks whose stages would exchange different values.
    """
    first, bad = ranks.world.rank == 0, [0]
    avoid: frozenset[int] = frozenset()
    for _ in range(ROUNDS):
        decided = split.decided()
        opened, calls, before = ranks.broadcast([sorted(decided.opened), decided.calls, _before(split)], 0)
        cuts = Cuts(frozenset(opened), tuple((name, key) for name, key in calls))
        same, bad = _with_cuts(split, cuts, before, args, kwargs)
        every = [set(json.loads(part)) for part in ranks.world.gather(json.dumps(bad).encode())]
        bad = sorted(set().union(*every))
        if not bad:
            assert same is not None
            split = same
            break
        if fixed:
            break
        avoid |= {calls[at][1] for at in bad}
        again = _chosen_again(split, avoid, args, kwargs) if first else None
        if not ranks.broadcast(again is not None, 0):
            break
        split = again or split
    if bad:
        raise other_forward(f"other calls before {calls[bad[0]][0]!r}")
    _require_same_exchange(ranks, split)
    return split


def _before(split: Split) -> list[int]:
    """Return, for every cut, one number that identifies all calls before it."""
    path = split.first
    names = [sorted(e.key for e in path.trace.events[:start] if not e.free) for start in path.starts[1:]]
    return [name_of(*some) for some in names]


def _with_cuts(
    split: Split, cuts: Cuts, before: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Split | None, list[int]]:
    """Return the split with rank 0's cuts, and the cuts before which this rank's forward calls other things."""
    if cuts != split.decided():
        try:
            split = Split(split.model, split.pieces, args, kwargs, cuts)
        except SplitError:
            names = split.first.trace.event_names
            return None, [at for at, (_, key) in enumerate(cuts.calls) if key not in names] or [0]
    here = _before(split)
    return split, [at for at in range(len(here)) if here[at] != before[at]]


def _chosen_again(split: Split, avoid: frozenset[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split | None:
    """Return a split with other cuts, or None where there is none."""
    try:
        return Split(split.model, split.pieces, args, kwargs, avoid=avoid)
    except SplitError:
        return None


def _require_same_exchange(ranks: Ranks, split: Split) -> None:
    """Raise for ranks whose stages would exchange different values."""
    every = [json.loads(part) for part in ranks.world.gather(json.dumps(_exchanged(split)).encode())]
    for rank, theirs in enumerate(every):
        for name in every[0] | theirs:
            if every[0].get(name) != theirs.get(name):
                what = every[0].get(name) or theirs.get(name)
                raise other_forward(f"{what} on {'rank 0' if name in every[0] else f'rank {rank}'} alone")


def _exchanged(split: Split) -> dict[str, str]:
    """Return the values that cross between stages and the owners of parameters: a description of each, by name."""
    path = split.first
    described = {name: f"parameter {name!r} on stage {stage}" for name, stage in split.owner.items()}
    for stage, values in enumerate(path.incoming):
        for value, source in values.items():
            event = path.trace.events[path.trace.values[value].made_by]
            described[f"{path.trace.values[value].key}"] = f"{event.name!r} from stage {source} to {stage}"
    return described
