"""What was measured (or estimated) of a model: its layers, and the graph of what feeds what."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from penstock.core.arguments import named_fields
from penstock.core.given import from_json_of, number, text, whole
from penstock.core.links import FloatArray
from penstock.errors import InputError

CORRECT = "correct the profile"
MOST_ROWS = 10**12  # of a micro-batch


@named_fields
@dataclass(frozen=True)
class Layer:
    """Seconds and bytes of one layer for one micro-batch of the profile's size."""

    name: str
    forward: float
    input_grad: float
    weight_grad: float
    output_bytes: float = 0.0
    kept_bytes: float = 0.0  # kept by the forward for the backward
    kept_until_weight_bytes: float = 0.0  # the part of it that must stay until the weight gradient
    parameter_bytes: float = 0.0
    buffer_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    update: float = 0.0  # of the optimizer, once a mini-batch
    full_backward: float = 0.0  # both gradients in one backward, where that was measured too
    spread: float = 0.0  # of the seconds from sample to sample: between the quartiles, as a share of the median

    def __post_init__(self) -> None:
        text("the name of a layer", self.name, CORRECT)
        for entry in fields(self)[1:]:
            _take(self, entry.name, f"{entry.name} of layer {self.name!r}")

    @classmethod
    def from_json(cls, data: dict[str, Any], at: int) -> Layer:
        """The layer of a profile's JSON that has this number there."""
        keys, needed = {entry.name for entry in fields(cls)}, ("name", "forward", "input_grad", "weight_grad")
        strange, missing = sorted(set(data) - keys), [key for key in needed if key not in data]
        if strange or missing:
            came = f"the unknown key {strange[0]!r}" if strange else f"no {missing[0]}"
            raise InputError(f"the figures of a layer in layers[{at}]", came, "write it with to_json")
        return cls(**data)

    @property
    def backward(self) -> float:
        """Seconds of both gradients, computed together."""
        return self.full_backward or self.input_grad + self.weight_grad

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Sent:
    """A tensor that leaves the layer that makes it: its bytes, and the layers that read it."""

    source: int
    readers: tuple[int, ...]
    bytes: float

    def __post_init__(self) -> None:
        _take(self, "bytes", f"bytes of a tensor that layer {self.source} sends")


@dataclass(frozen=True)
class PerStage:
    """Seconds that a stage takes for itself, whatever its layers: for each forward, each backward, and each update."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            _take(self, entry.name, f"{entry.name} of per_stage")


def _take(noun: object, name: str, what: str) -> None:
    """Make a figure a float, if it is one: planners add them up in arrays, where whole numbers have 64 bits."""
    value = getattr(noun, name)
    number(what, value, CORRECT)
    object.__setattr__(noun, name, float(value))


@named_fields
@dataclass(frozen=True)
class Profile:
    """Layers in an order in which each comes after all that feed it; `edges` are (from, to) pairs of layer numbers.

    Where a layer's output is several tensors that go different ways, `sent` has them all. `newest` is the share by
    which all takes longer where backwards are given newer weights than their forwards had. `jitter` is by how much
    the seconds of a stage's forward or backward deviate from one micro-batch to the next: the root of the mean square,
    as a share of their mean.
    """

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...] = ()
    samples: int = 1  # rows of the micro-batch that was measured
    device: str = "unknown"
    sent: tuple[Sent, ...] = ()
    per_stage: PerStage = PerStage()
    repetitions: int = 0  # samples that the seconds come from
    disturbed: int = 0  # those among them during which other processes used the cores
    busy: int = 1  # processes that measured at the same time
    newest: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError("a profile with at least one layer", "none", "profile a model that has layers")
        whole("samples", self.samples, most=MOST_ROWS)
        number("newest", self.newest, CORRECT)
        number("jitter", self.jitter, CORRECT)
        if not self.edges:
            object.__setattr__(self, "edges", tuple((i, i + 1) for i in range(len(self.layers) - 1)))
        for one in self.sent:
            whole("the layer that sends a tensor", one.source, 0, len(self.layers) - 1)
        pairs = [(one.source, reader) for one in self.sent for reader in one.readers]
        for a, b in (*self.edges, *pairs):
            if not 0 <= whole("the layer of an edge", a, 0) < whole("the layer of an edge", b, 0) < len(self.layers):
                raise InputError(
                    f"edges from an earlier to a later of {len(self.layers)} layers (no cycles)",
                    (a, b),
                    "order the layers so that each comes after those that feed it",
                )

    def crossing(self, cuts: tuple[int, ...]) -> dict[tuple[int, int], float]:
        """Bytes that stage a hands to stage b, for stages that begin at the layers `cuts` (the first at 0).

        A layer's output that several layers of one stage use crosses once.
        """
        if self._crossings.keys() != {cuts}:
            self._crossings.clear()
            self._crossings[cuts] = self._crossing(cuts)
        return dict(self._crossings[cuts])

    @cached_property
    def _crossings(self) -> dict[tuple[int, ...], dict[tuple[int, int], float]]:
        """What the last cuts were found to cross: the costs of a plan ask for it several times."""
        return {}

    def _crossing(self, cuts: tuple[int, ...]) -> dict[tuple[int, int], float]:
        stage = self._stages(cuts)
        crosses: dict[tuple[int, int], float] = {}
        for one in self.outputs:
            for reader in {stage[layer] for layer in one.readers} - {stage[one.source]}:
                pair = (stage[one.source], reader)
                crosses[pair] = crosses.get(pair, 0.0) + one.bytes
        return dict(sorted(crosses.items()))

    def leaving(self, cuts: tuple[int, ...]) -> list[float]:
        """Bytes that each stage makes for others, and keeps beside what its layers keep. Known from `sent` alone."""
        stage, found = self._stages(cuts), [0.0] * (len(cuts) + 1)
        for one in self.sent:
            if any(stage[reader] != stage[one.source] for reader in one.readers):
                found[stage[one.source]] += one.bytes
        return found

    def _stages(self, cuts: tuple[int, ...]) -> list[int]:
        starts = (0, *cuts)
        return [bisect_right(starts, layer) - 1 for layer in range(len(self.layers))]

    def column(self, name: str) -> FloatArray:
        """One figure of all layers."""
        return self._columns[name]

    @cached_property
    def _columns(self) -> dict[str, FloatArray]:
        names = [entry.name for entry in fields(Layer)[1:]] + ["backward"]
        return {name: np.array([getattr(layer, name) for layer in self.layers], dtype=np.float64) for name in names}

    @cached_property
    def outputs(self) -> tuple[Sent, ...]:
        """All that layers send: unless there is more to know, one tensor for each that feeds others."""
        if self.sent:
            return self.sent
        readers: dict[int, list[int]] = {}
        for a, b in self.edges:
            readers.setdefault(a, []).append(b)
        return tuple(Sent(a, tuple(later), self.layers[a].output_bytes) for a, later in sorted(readers.items()))

    def to_json(self) -> dict[str, Any]:
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "edges": [list(edge) for edge in self.edges],
            "samples": self.samples,
            "device": self.device,
            "sent": [[one.source, list(one.readers), one.bytes] for one in self.sent],
            "per_stage": asdict(self.per_stage),
            "repetitions": self.repetitions,
            "disturbed": self.disturbed,
            "busy": self.busy,
            "newest": self.newest,
            "jitter": self.jitter,
        }

    @classmethod
    @from_json_of("profile")
    def from_json(cls, data: dict[str, Any]) -> Profile:
        return cls(
            layers=tuple(Layer.from_json(layer, at) for at, layer in enumerate(data["layers"])),
            edges=tuple((a, b) for a, b in data["edges"]),
            samples=data["samples"],
            device=data["device"],
            sent=tuple(Sent(source, tuple(readers), size) for source, readers, size in data.get("sent", ())),
            per_stage=PerStage(**data.get("per_stage", {})),
            repetitions=data.get("repetitions", 0),
            disturbed=data.get("disturbed", 0),
            busy=data.get("busy", 1),
            newest=data.get("newest", 0.0),
            jitter=data.get("jitter", 0.0),
        )
