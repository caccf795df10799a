"""Random requests that a builder must be able to meet, as hypothesis strategies."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from penstock.core.schedule import Schedule
from penstock.schedules.registry import METHODS, schedule
from published import Setting

NAMES = sorted(name for name in METHODS if name != "auto")
ASYNCHRONOUS = sorted(name for name in NAMES if METHODS[name].asynchronous)
Ask = tuple[str, dict[str, Any]]


@st.composite
def asks(draw: st.DrawFn, names: list[str] = NAMES, most_stages: int = 6, skips: bool = True) -> Ask:
    """A method's name and arguments for `schedule`."""
    name = draw(st.sampled_from(names))
    p = draw(st.integers(1, most_stages))
    wide = 3 if p < 4 else 2
    asked: dict[str, Any] = {
        "stages": p,
        "microbatches": draw(st.integers(1, 7)),
        "batches": draw(st.integers(1, 3)),
        "replicas": tuple(draw(st.lists(st.integers(1, wide), min_size=p, max_size=p))),
    }
    asked |= draw(st.fixed_dictionaries(_own(name, p)))
    pieces = p * asked.get("chunks", 2 if METHODS[name].chunks == (2, 2) else 1)
    if skips and pieces > 2 and draw(st.booleans()):
        pair = st.tuples(st.integers(0, pieces - 1), st.integers(0, pieces - 1))
        more = draw(st.lists(pair.filter(lambda e: e[0] + 1 < e[1]), max_size=3, unique=True))
        asked["edges"] = (*((s, s + 1) for s in range(pieces - 1)), *more)
    return name, asked


def _own(name: str, p: int) -> dict[str, st.SearchStrategy[Any]]:
    """What a method wants otherwise than the rest."""
    match name:
        case "interleaved":
            return {"microbatches": st.sampled_from([p, 2 * p]), "chunks": st.integers(1, 3)}
        case "dualpipe-v":
            return {"microbatches": st.integers(2 * p, 2 * p + 2), "overlap": st.booleans()}
        case "dapple":
            return {"policy": st.sampled_from(["pa", "pb"]), "cap": st.sampled_from([None, 1, 2, 3])}
        case "2bw":
            return {"microbatches": st.integers(p, p + 3), "batches": st.integers(1, 5)}
        case "pipemare":
            return {"microbatches": st.integers(1, 4), "batches": st.integers(1, 6)}
        case "pipedream":
            kinds = [(True, False), (True, True), (False, False)]
            return {
                "microbatches": st.integers(1, 3),
                "batches": st.integers(1, 9),
                **_flags(kinds),
            }
    return {}


def _flags(kinds: list[tuple[bool, bool]]) -> dict[str, st.SearchStrategy[bool]]:
    """Stashing and vertical sync, drawn together."""
    stash, vertical = zip(*kinds, strict=True)
    at = st.shared(st.integers(0, len(kinds) - 1), key="kind of pipedream")
    return {"stash": at.map(stash.__getitem__), "vertical_sync": at.map(vertical.__getitem__)}


def build(ask: Ask) -> Schedule:
    name, asked = ask
    return schedule(name, **asked)


def setting_of(ask: Ask, edges: tuple[tuple[int, int], ...], placement: tuple[int, ...]) -> Setting:
    """The same request in the terms of the published rules."""
    name, asked = ask
    replicas = tuple(asked["replicas"][rank] for rank in placement)
    return Setting(edges, asked["microbatches"], asked["batches"], replicas, turns=name == "pipedream")


def rule_of(ask: Ask) -> str:
    name, asked = ask
    if name == "pipedream":
        return "vertical" if asked["vertical_sync"] else "stash" if asked["stash"] else "no_stash"
    return {"2bw": "two_bw", "pipemare": "pipemare"}.get(name, "sync")
