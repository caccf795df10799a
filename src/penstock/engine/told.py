"""What stages tell each other besides tensors, as words on the wire: shapes that open code asks for, plain results.

Both ends know the trace, so only what differs from it is told: nothing at all while sizes stay those of the trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from penstock.errors import SplitError
from penstock.model import tree
from penstock.model.replay import Passage
from penstock.model.trace import Trace

_PLAIN = (type(None), bool, int, float, str)


def tell(passage: Passage, seen: Trace) -> bytes:
    """The words for a passage, as far as it is not what the trace has."""
    if not (passage.shapes or passage.plain or passage.grads):
        return b""
    shapes = {
        value: [list(shape), _name(dtype)]
        for value, (shape, dtype) in passage.shapes.items()
        if (shape, dtype) != (seen.values[value].shape, seen.values[value].dtype)
    }
    plain = {}
    for event, result in passage.plain.items():
        words = [_word(leaf, seen.events[event].name) for leaf in tree.leaves(result)]
        if words != [_word(leaf, seen.events[event].name) for leaf in tree.leaves(seen.results[event])]:
            plain[event] = words
    told = [shapes, plain, passage.grads]
    return json.dumps(told).encode() if any(told) else b""


def hear(words: bytes, passage: Passage, seen: Trace) -> None:
    """Understand what was told."""
    if not words:
        return
    shapes, plain, grads = json.loads(words)
    passage.grads.update({int(value): grad for value, grad in grads.items()})
    for value, (shape, dtype) in shapes.items():
        passage.shapes[int(value)] = (tuple(shape), getattr(torch, dtype))
    for event, leaves in plain.items():
        heard = map(_leaf, leaves)
        passage.plain[int(event)] = tree.replace_leaves(seen.results[int(event)], partial(_following, heard))


def _following(heard: Iterator[Any], _: Any) -> Any:
    return next(heard)


def _leaf(word: Any) -> Any:
    if isinstance(word, dict):
        return torch.empty(word["shape"], dtype=getattr(torch, word["type"]), device="meta")
    return word


def _word(leaf: Any, name: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        return {"shape": list(leaf.shape), "type": _name(leaf.dtype)}
    if isinstance(leaf, _PLAIN):
        return leaf
    raise SplitError(
        "results of modules to be tensors, numbers, words and containers of them where a cut follows",
        f"a {type(leaf).__name__} from {name}",
        "cut behind the last use of it",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
