"""The facts of a checkpoint, each looked at before anything of a pipeline changes: its type, its range, its names.

A checksum tells that a file is as it was written, not that penstock wrote it. What is wrong here is a ValueError that
names the fact.
"""

from __future__ import annotations

from math import isfinite, prod
from pathlib import Path
from typing import Any

from penstock.training.checkpoint.plain_values import dtype_of, read, require_random_states
from penstock.training.weight_files.safetensors import FILES

Table = dict[str, Any]


def require_facts(facts: Table, records: Table) -> None:
    """Refuse facts that no save has written; `records` are those of the tensors, by name."""
    known = {name.removeprefix("model.") for name in records if name.startswith("model.")}
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
    _require_groups(facts, known)
    _require_kept(table(facts["kept"], "kept"), known, records)
    for number, states in enumerate(several(facts["random"], "random", least=1)):
        require_random_states(plain_table(states, f"random states of rank {number}"))
    _require_names(facts, known)


def _require_training(facts: Table) -> None:
    _ = facts["scale"] is None or positive(facts["scale"], "scale")
    whole(facts["good"], "good")
    _ = facts["since"] is None or whole(facts["since"], "since")
    sums = table(facts["accumulated"], "accumulated")
    whole(sums["steps"], "accumulated steps")
    finite(sums["weight"], "accumulated weight")
    positive(sums["unit"], "accumulated unit")


def _require_groups(facts: Table, known: set[str]) -> None:
    met: set[str] = set()
    for group in several(facts["groups"], "groups"):
        for name in several(group["parameters"], "a group's parameters", least=1):
            if name not in known or name in met:
                raise ValueError(f"a group with {name!r}, " + ("in another, too" if name in met else "no parameter"))
            met.add(name)
        plain_table(group["settings"], "a group's settings")
        if (group["scheduler"] is None) != (facts["optimizer"]["LR scheduler"] is None):
            raise ValueError("an LR scheduler with a state for some groups alone")
        _ = group["scheduler"] is None or plain_table(group["scheduler"], "an LR scheduler's state")


def _require_kept(kept: Table, known: set[str], records: Table) -> None:
    """What optimizers keep: as tensors, which are there, or as plain values; a key is the one or the other for all."""
    kinds: dict[str, type] = {}
    tensors = set()
    for name, keys in kept.items():
        if name not in known:
            raise ValueError(f"a state of {name!r}, no parameter")
        for key, told in table(keys, f"the state of {name}").items():
            if several(told, f"{key} of {name}", most=1):
                kind = type(read(told[0]))
                if kinds.setdefault(key, kind) is not kind:
                    raise ValueError(f"{key} of {name} as {told[0]!r}")
            else:
                tensors.add(f"optimizer.{name}.{key}")
    differing = tensors ^ {name for name in records if name.startswith("optimizer.")}
    if differing:
        raise ValueError(f"a state of the optimizer in one of two places alone: {min(differing)}")


def _require_names(facts: Table, known: set[str]) -> None:
    """Facts for exports, which checkpoints of before do not have."""
    for name, first in table(facts.get("tied", {}), "tied").items():
        if first not in known or name in known:
            raise ValueError(f"{name!r} tied to {first!r}")
    pretrained = facts.get("pretrained")
    if pretrained is not None:
        for name, content in table(pretrained, "pretrained").items():
            text(content, f"the contents of {name}")
            if name not in FILES:
                raise ValueError(f"a file {name!r} of a model of transformers")


def require_record(told: Table, sizes: dict[str, int]) -> Table:
    """Where a tensor lies: inside its file, in as many bytes as it needs."""
    shape = [whole(extent, "an extent") for extent in several(told["shape"], "a shape")]
    offset, length = whole(told["offset"], "an offset"), whole(told["length"], "a length")
    whole(told["crc"], "a checksum")
    bare(told["file"])
    if told["file"] not in sizes or offset + length > sizes[told["file"]]:
        raise ValueError(f"a tensor at {offset} to {offset + length}, outside of {told['file']}")
    if prod(shape) * dtype_of(told["dtype"]).itemsize > length:
        raise ValueError(f"a tensor of shape {shape} in {length} bytes")
    return told


def bare(value: Any) -> str:
    """The name of a file in the checkpoint itself."""
    if Path(text(value, "a file")).name != value:
        raise ValueError(f"a file outside the checkpoint, {value!r}")
    return str(value)


def plain_table(told: Any, what: str) -> Table:
    """A table of plain values, decoded; its keys are words."""
    found = table(read(told), what)
    return {text(key, f"a key of {what}"): value for key, value in found.items()}


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
