"""Encode facts that accompany tensors from stage to stage, as JSON: shapes that open code asks for, and plain results.

Both ends have the trace, so only differences from it are sent: nothing while sizes stay those of the trace.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from penstock.errors import SplitError
from penstock.model import tree
from penstock.model.naming import leaf_places
from penstock.model.passage import Passage
from penstock.model.row_names import RowNames
from penstock.model.trace import Trace

_PLAIN = (type(None), bool, int, float, str)


def encode_passage(passage: Passage, trace: Trace, names: RowNames | None = None) -> bytes:
    """Return the differences between a passage and the trace, encoded; empty where they agree. With `names` that
    forwards of other numbers of rows have in common, all of it: the other trace may be of another forward."""
    if names is not None:
        return _encode_all(passage, trace, names)
    if not (passage.shapes or passage.plain or passage.grads):
        return b""
    values = trace.values
    shapes = {
        values[value].key: [list(shape), _name(dtype)]
        for value, (shape, dtype) in passage.shapes.items()
        if (shape, dtype) != (values[value].shape, values[value].dtype)
    }
    plain = {}
    for event, result in passage.plain.items():
        name = trace.events[event].name
        description = _describe_result(result, name)
        if description != _describe_result(trace.results[event], name):
            plain[trace.events[event].key] = description
    facts = [shapes, plain, {values[value].key: grad for value, grad in passage.grads.items()}]
    return json.dumps(facts).encode() if any(facts) else b""


def _encode_all(passage: Passage, trace: Trace, names: RowNames) -> bytes:
    shapes = {names.values[value]: [list(shape), _name(dtype)] for value, (shape, dtype) in passage.shapes.items()}
    plain = {names.events[at]: _describe_result(result, trace.events[at].name) for at, result in passage.plain.items()}
    facts = [shapes, plain, {names.values[value]: grad for value, grad in passage.grads.items()}]
    return json.dumps(facts).encode() if any(facts) else b""


def decode_passage(facts: bytes, passage: Passage, trace: Trace, names: RowNames | None = None) -> None:
    """Add the facts that `encode_passage` encoded to a passage."""
    if not facts:
        return
    shapes, plain, grads = json.loads(facts)
    values, events = (
        (trace.value_names, trace.event_names) if names is None else (names.value_numbers, names.event_numbers)
    )
    try:
        passage.grads.update({values[int(key)]: grad for key, grad in grads.items()})
        for key, (shape, dtype) in shapes.items():
            passage.tell(values[int(key)], (tuple(shape), getattr(torch, dtype)))
        for key, leaves in plain.items():
            event = events[int(key)]
            passage.plain[event] = _with_leaves(trace.results[event], leaves)
    except KeyError:
        raise other_forward("a call that this one does not make") from None


def _with_leaves(result: Any, leaves: dict[str, Any]) -> Any:
    places = iter(leaf_places(result))
    return tree.replace_leaves(result, lambda _: _leaf(leaves[next(places)]))


def other_forward(came: str) -> SplitError:
    """Return the error for ranks whose forwards differ."""
    return SplitError(
        "the same forward on every rank",
        f"one of another rank with {came}",
        "go through lists or sorted(...) in place of sets, and let nothing depend on id() or on unseeded random "
        "numbers",
    )


def _describe_result(result: Any, name: str) -> dict[str, Any]:
    return {
        place: _describe_leaf(leaf, name) for place, leaf in zip(leaf_places(result), tree.leaves(result), strict=True)
    }


def _leaf(word: Any) -> Any:
    if isinstance(word, dict):
        return torch.empty(word["shape"], dtype=getattr(torch, word["type"]), device="meta")
    return word


def _describe_leaf(leaf: Any, name: str) -> Any:
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
