"""Random damage to JSON and to text: a few small changes, reproducible from a seed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from random import Random
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 999_999, 2**31 - 1, 2**31, 2**63, 2**70, 10**400),
    *(0.5, -0.0, 1e-320, 1e30, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *("", "x", "0", "1.5", "0F0", "9F9", "0U@999999999", "sync", "\x00", "\ud800", "é" * 50),
    *([], {}, [[]], [None], {"a": 1}, [1, 2, 3], [[0, 1]]),
)
Place = tuple[Any, Any]  # a list or dict, and where in it


def places(node: Any) -> Iterator[Place]:
    """Every value in lists and dicts; of long lists a few."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from places(node[key])


def damaged(data: Any, random: Random) -> Any:
    """A copy with one to three changes."""
    found = {"": copy.deepcopy(data)}
    for _ in range(random.choice((1, 1, 2, 3))):
        by_depth: dict[int, list[Place]] = {}
        for at, place in enumerate(places(found)):
            by_depth.setdefault(min(at, 40), []).append(place)  # heads are few, numbers many: either has its share
        holder, key = random.choice(by_depth[random.choice(list(by_depth))])
        _change(holder, key, random)
    return found[""]


def _change(holder: Any, key: Any, random: Random) -> None:
    kind = random.randrange(6)
    if kind == 0 and not (isinstance(holder, dict) and key == ""):
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(random.randrange(len(holder) + 1), holder[key])
    elif kind == 2 and isinstance(holder, list):
        other = random.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
    elif kind == 3 and isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
        holder[key] = random.choice((-holder[key], holder[key] * 1000, holder[key] + 1, str(holder[key])))
    else:
        holder[key] = copy.deepcopy(random.choice(ODD))


def garbled(text: str, random: Random) -> str:
    """The text with one to three changes of a sign, a word or a line."""
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(text) + 1)
        kind = random.randrange(5)
        if kind == 0:
            text = text[:at] + text[at + random.randrange(1, 9) :]
        elif kind == 1:
            text = text[:at] + random.choice(",.:;#@<>&-=\n\"'[]{}019FBIWRUx\x00é") + text[at:]
        elif kind == 2:
            text = text[:at] + str(random.choice(ODD)) + text[at:]
        else:
            lines = text.splitlines(keepends=True) or [""]
            line = random.randrange(len(lines))
            lines[line : line + 1] = [lines[line]] * random.choice((0, 2)) if kind == 3 else [lines[line].upper()]
            text = "".join(lines)
    return text
