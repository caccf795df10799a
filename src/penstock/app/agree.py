"""One split for all ranks: rank 0 says where the model is cut, and what crosses is compared by name.

A forward may do the same things in another order on each rank, where it goes through a set, say; then ranks number what
they meet differently, and might even balance the stages differently.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.app.crew import Crew
from penstock.engine.told import other_forward
from penstock.errors import SplitError
from penstock.model.split import Cuts, Split


def agreed_split(crew: Crew, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split:
    """The split with rank 0's cuts. Refuses ranks whose stages would exchange different values."""
    mine = split.decided()
    opened, calls = crew.told([sorted(mine.opened), mine.calls], 0)
    wanted = Cuts(frozenset(opened), tuple((name, key) for name, key in calls))
    refused: SplitError | None = None
    if wanted != mine:
        try:
            split = Split(split.model, split.pieces, args, kwargs, wanted)
        except SplitError as error:  # rank 0 must hear of it, too
            refused = error
    found = {} if refused else _exchanged(split)
    every = [json.loads(part) for part in crew.world.gather(json.dumps(found).encode())]
    if refused is not None:
        raise refused
    for rank, theirs in enumerate(every):
        _require_same(every[0], theirs, rank)
    return split


def _exchanged(split: Split) -> dict[str, str]:
    """What crosses between stages, and which stage owns each parameter: what it is called, and what it is."""
    path = split.first
    found = {f"parameter {name}": f"on stage {stage}" for name, stage in split.owner.items()}
    for stage, values in enumerate(path.incoming):
        for value, source in values.items():
            event = path.trace.events[path.trace.values[value].made_by]
            found[f"{path.trace.values[value].key}"] = f"{event.name!r} from stage {source} to {stage}"
    return found


def _require_same(zero: dict[str, str], other: dict[str, str], rank: int) -> None:
    if not other:
        raise other_forward(f"other calls than rank 0's, on rank {rank}")
    for name in zero | other:
        if zero.get(name) != other.get(name):
            what = zero.get(name) or other.get(name)
            raise other_forward(f"{what} on {'rank 0' if name in zero else f'rank {rank}'} alone")
