"""What was measured (or estimated) of a model: its layers, and the graph of what feeds what."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

from penstock.core.given import from_json_of
from penstock.errors import InputError


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

    def __post_init__(self) -> None:
        for entry in fields(self)[1:]:
            value = getattr(self, entry.name)
            if not (isfinite(value) and value >= 0):
                raise InputError(f"{entry.name} of layer {self.name!r} to be 0 or more", value, "correct the profile")

    @property
    def seconds(self) -> float:
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True)
class Profile:
    """Layers in an order in which each comes after all that feed it; `edges` are (from, to) pairs of layer numbers."""

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...] = ()
    samples: int = 1  # rows of the micro-batch that was measured
    device: str = "unknown"

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError("a profile with at least one layer", "none", "profile a model that has layers")
        if not self.edges:
            object.__setattr__(self, "edges", tuple((i, i + 1) for i in range(len(self.layers) - 1)))
        for a, b in self.edges:
            if not 0 <= a < b < len(self.layers):
                raise InputError(
                    f"edges from an earlier to a later of {len(self.layers)} layers (no cycles)",
                    (a, b),
                    "order the layers so that each comes after those that feed it",
                )

    def crossing(self, cuts: tuple[int, ...]) -> dict[tuple[int, int], float]:
        """Bytes that stage a hands to stage b, for stages that begin at the layers `cuts` (the first at 0).

        A layer's output that several layers of one stage use crosses once.
        """
        starts = (0, *cuts)
        stage = [sum(layer >= start for start in starts) - 1 for layer in range(len(self.layers))]
        sent: dict[tuple[int, int], set[int]] = {}
        for a, b in self.edges:
            if stage[a] != stage[b]:
                sent.setdefault((stage[a], stage[b]), set()).add(a)
        return {pair: sum(self.layers[a].output_bytes for a in layers) for pair, layers in sorted(sent.items())}

    def to_json(self) -> dict[str, Any]:
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "edges": [list(edge) for edge in self.edges],
            "samples": self.samples,
            "device": self.device,
        }

    @classmethod
    @from_json_of("profile")
    def from_json(cls, data: dict[str, Any]) -> Profile:
        layers = tuple(Layer(**layer) for layer in data["layers"])
        return cls(layers, tuple((a, b) for a, b in data["edges"]), data["samples"], data["device"])
