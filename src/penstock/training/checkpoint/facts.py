"""Checks of a checkpoint's facts before a pipeline changes: types, ranges and names.

A checksum shows that a file is as it was written, not that penstock wrote it. A wrong fact is a ValueError that names
it.
"""

from __future__ import annotations

from math import isfinite, prod
from pathlib import Path
from typing import Any

from penstock.training.checkpoint.plain_values import dtype_of, read, require_random_states
from penstock.training.weight_files.safetensors import FILES

Table = dict[str, Any]


def require_facts(facts: Table, records: Table) -> None:
    """Raise for facts that no save has written; `records` are those of the tensors, by name."""
    weights = {name.removeprefix("model.") for name in records if name.startswith("model.")}
    whole(facts["step"], "step")
    text(facts["torch"], "torch")
    layout = table(facts["layout"], "layout")
    text(layout["schedule"], "layout")
    for name in ("stages", "ranks", "microbatches"):
        whole(layout[name], f"layout {name}", least=1)
    _require_training(facts)
    kinds = facts["optimizer"]
    if kinds is not None:
        text(kinds["optimizer"], "optimizer")
        _ = kinds["LR scheduler"] is None or text(kinds["LR scheduler"], "LR scheduler")
    _require_groups(facts, weights)
    _require_kept(table(facts["kept"], "kept"), weights, records)
    for number, states in enumerate(several(facts["random"], "random", least=1)):
        require_random_states(plain_table(states, f"random states of rank {number}"))
    _require_names(facts, weights)


def _require_training(facts: Table) -> None:
    _ = facts["scale"] is None or positive(facts["scale"], "scale")
    whole(facts["good"], "good")
    _ = facts["since"] is None or whole(facts["since"], "since")
    sums = table(facts["accumulated"], "accumulated")
    whole(sums["steps"], "accumulated steps")
    finite(sums["weight"], "accumulated weight")
    positive(sums["unit"], "accumulated unit")


def _require_groups(facts: Table, weights: set[str]) -> None:
    grouped: set[str] = set()
    for group in several(facts["groups"], "groups"):
        for name in several(group["parameters"], "a group's parameters", least=1):
            if name not in weights or name in grouped:
                raise ValueError(
                    f"a group with {name!r}, " + ("in another, too" if name in grouped else "no parameter")
                )
            grouped.add(name)
        plain_table(group["settings"], "a group's settings")
        if (group["scheduler"] is None) != (facts["optimizer"]["LR scheduler"] is None):
            raise ValueError("an LR scheduler with a state for some groups alone")
        _ = group["scheduler"] is None or plain_table(group["scheduler"], "an LR scheduler's state")


def _require_kept(kept: Table, weights: set[str], records: Table) -> None:
    """Check the state of optimizers: a key is a tensor or a plain value, the same for all parameters."""
    kinds: dict[str, type] = {}
    tensors = set()
    for name, keys in kept.items():
        if name not in weights:
            raise ValueError(f"a state of {name!r}, no parameter")
        for key, plain in table(keys, f"the state of {name}").items():
            if several(plain, f"{key} of {name}", most=1):
                kind = type(read(plain[0]))
                if kinds.setdefault(key, kind) is not kind:
                    raise ValueError(f"{key} of {name} as {plain[0]!r}")
            else:
                tensors.add(f"optimizer.{name}.{key}")
    differing = tensors ^ {name for name in records if name.startswith("optimizer.")}
    if differing:
        raise ValueError(f"a state of the optimizer in one of two places alone: {min(differing)}")


def _require_names(facts: Table, weights: set[str]) -> None:
    """Check the facts for exports, which older checkpoints do not have."""
    for name, first in table(facts.get("tied", {}), "tied").items():
        if first not in weights or name in weights:
            raise ValueError(f"{name!r} tied to {first!r}")
    pretrained = facts.get("pretrained")
    if pretrained is not None:
        for name, content in table(pretrained, "pretrained").items():
            text(content, f"the contents of {name}")
            if name not in FILES:
                raise ValueError(f"a file {name!r} of a model of transformers")


def require_record(record: Table, sizes: dict[str, int]) -> Table:
    """Return a tensor's record if it lies inside its file and has enough bytes, else raise."""
    shape = [whole(extent, "an extent") for extent in several(record["shape"], "a shape")]
    offset, length = whole(record["offset"], "an offset"), whole(record["length"], "a length")
    whole(record["crc"], "a checksum")
    bare(record["file"])
    if record["file"] not in sizes or offset + length > sizes[record["file"]]:
        raise ValueError(f"a tensor at {offset} to {offset + length}, outside of {record['file']}")
    if prod(shape) * dtype_of(record["dtype"]).itemsize > length:
        raise ValueError(f"a tensor of shape {shape} in {length} bytes")
    return record


def bare(value: Any) -> str:
    """Return the name of a file if it lies in the checkpoint itself, else raise."""
    if Path(text(value, "a file")).name != value:
        raise ValueError(f"a file outside the checkpoint, {value!r}")
    return str(value)


def plain_table(encoded: Any, what: str) -> Table:
    """Return a decoded table of plain values, whose keys are texts."""
    decoded = table(read(encoded), what)
    return {text(key, f"a key of {what}"): value for key, value in decoded.items()}


def whole(value: Any, what: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 63:
        raise ValueError(f"{what} {value!r}")
    return value


def finite(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not isfinite(value):
        raise ValueError(f"{what} {value!r}")
    return float(value)


def positive(value: Any, what: str) -> float:
    if finite(value, what) <= 0:
        raise ValueError(f"{what} {value!r}")
    return float(value)


def text(value: Any, what: str) -> str:
    if type(value) is not str:
        raise ValueError(f"{what} {value!r}")
    return value


def table(value: Any, what: str) -> Table:
    if not isinstance(value, dict):
        raise ValueError(f"{what} {value!r}")
    return value


def several(value: Any, what: str, least: int = 0, most: int | None = None) -> list[Any]:
    if not isinstance(value, list) or len(value) < least or (most is not None and len(value) > most):
        raise ValueError(f"{what} {value!r}")
    return value
