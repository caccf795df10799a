"""A profile: the measured or estimated costs of a model's layers, and the graph of data between them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from penstock.core.arguments import named_fields
from penstock.core.links import FloatArray
from penstock.core.validation import from_json_of, number, text, whole
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
    kept_bytes: float = 0.0  # kept from forward to backward
    kept_until_weight_bytes: float = 0.0  # the part that is kept until the weight gradient
    parameter_bytes: float = 0.0
    buffer_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    update: float = 0.0  # of the optimizer, once a mini-batch
    full_backward: float = 0.0  # both gradients in one backward, where measured
    spread: float = 0.0  # interquartile range of the measured seconds, as a share of the median

    def __post_init__(self) -> None:
        text("the name of a layer", self.name, CORRECT)
        for entry in fields(self)[1:]:
            _set_float(self, entry.name, f"{entry.name} of layer {self.name!r}")

    @classmethod
    def from_json(cls, data: dict[str, Any], at: int) -> Layer:
        """Return the layer number `at` of a profile's JSON."""
        keys, needed = {entry.name for entry in fields(cls)}, ("name", "forward", "input_grad", "weight_grad")
        unknown, missing = sorted(set(data) - keys), [key for key in needed if key not in data]
        if unknown or missing:
            came = f"the unknown key {unknown[0]!r}" if unknown else f"no {missing[0]}"
            raise InputError(f"the figures of a layer in layers[{at}]", came, "write it with to_json")
        return cls(**data)

    @property
    def backward(self) -> float:
        """Seconds of both gradients computed together."""
        return self.full_backward or self.input_grad + self.weight_grad

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Sent:
    """A tensor that other layers read: the layer that produces it, its readers and its bytes."""

    source: int
    readers: tuple[int, ...]
    bytes: float

    def __post_init__(self) -> None:
        _set_float(self, "bytes", f"bytes of a tensor that layer {self.source} sends")


@dataclass(frozen=True)
class PerStage:
    """Overhead of a stage in seconds, independent of its layers, of each forward, backward and update."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            _set_float(self, entry.name, f"{entry.name} of per_stage")


def _set_float(entry: object, name: str, what: str) -> None:
    """Check a number and convert it to float: planners add numbers up in arrays, where integers may overflow."""
    value = getattr(entry, name)
    number(what, value, CORRECT)
    object.__setattr__(entry, name, float(value))


@named_fields
@dataclass(frozen=True)
class Profile:
    """Layers in topological order, and `edges`, the (from, to) pairs of layer numbers.

    Where a layer outputs several tensors with different readers, `sent` lists all tensors. `newest` is the share by
    which everything is slower when backwards use newer weights than their forwards. `jitter` is the standard deviation
    of a stage's seconds from one micro-batch to the next, as a share of their mean.
    """

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...] = ()
    samples: int = 1  # rows of the measured micro-batch
    device: str = "unknown"
    sent: tuple[Sent, ...] = ()
    per_stage: PerStage = PerStage()
    repetitions: int = 0  # samples of the measurement
    disturbed: int = 0  # samples during which other processes used the cores
    busy: int = 1  # processes that measured at once
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
        for tensor in self.sent:
            whole("the layer that sends a tensor", tensor.source, 0, len(self.layers) - 1)
        pairs = [(tensor.source, reader) for tensor in self.sent for reader in tensor.readers]
        for a, b in (*self.edges, *pairs):
            if not 0 <= whole("the layer of an edge", a, 0) < whole("the layer of an edge", b, 0) < len(self.layers):
                raise InputError(
                    f"edges from an earlier to a later of {len(self.layers)} layers (no cycles)",
                    (a, b),
                    "order the layers so that each comes after those that feed it",
                )

    def crossing(self, cuts: tuple[int, ...]) -> dict[tuple[int, int], float]:
        """Return the bytes sent from stage a to stage b, by (a, b), for stages that begin at layers 0 and `cuts`.

        An output that several layers of one stage read is sent once.
        """
        if self._crossings.keys() != {cuts}:
            self._crossings.clear()
            self._crossings[cuts] = self._crossing(cuts)
        return dict(self._crossings[cuts])

    @cached_property
    def _crossings(self) -> dict[tuple[int, ...], dict[tuple[int, int], float]]:
        """Result of `crossing` for the cuts of the last call: the costs of a plan need it several times."""
        return {}

    def _crossing(self, cuts: tuple[int, ...]) -> dict[tuple[int, int], float]:
        stage = self._stages(cuts)
        crosses: dict[tuple[int, int], float] = {}
        for tensor in self.outputs:
            for reader in {stage[layer] for layer in tensor.readers} - {stage[tensor.source]}:
                pair = (stage[tensor.source], reader)
                crosses[pair] = crosses.get(pair, 0.0) + tensor.bytes
        return dict(sorted(crosses.items()))

    def leaving(self, cuts: tuple[int, ...]) -> list[float]:
        """Return the bytes of `sent` that each stage sends, which it keeps beside those that its layers keep."""
        stage, leaving = self._stages(cuts), [0.0] * (len(cuts) + 1)
        for tensor in self.sent:
            if any(stage[reader] != stage[tensor.source] for reader in tensor.readers):
                leaving[stage[tensor.source]] += tensor.bytes
        return leaving

    def _stages(self, cuts: tuple[int, ...]) -> list[int]:
        starts = (0, *cuts)
        return [bisect_right(starts, layer) - 1 for layer in range(len(self.layers))]

    def column(self, name: str) -> FloatArray:
        """Return one figure of all layers, by its name."""
        return self._columns[name]

    @cached_property
    def _columns(self) -> dict[str, FloatArray]:
        names = [entry.name for entry in fields(Layer)[1:]] + ["backward"]
        return {name: np.array([getattr(layer, name) for layer in self.layers], dtype=np.float64) for name in names}

    @cached_property
    def outputs(self) -> tuple[Sent, ...]:
        """Tensors that layers send: `sent`, or else one for each layer with successors."""
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
            "sent": [[tensor.source, list(tensor.readers), tensor.bytes] for tensor in self.sent],
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
