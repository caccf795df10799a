"""The same model with micro-batches of another size: seconds and activations in proportion, weights as they were."""

from __future__ import annotations

from dataclasses import replace

from penstock.core.profile import Layer, Profile
from penstock.errors import InputError

BY_ROWS = (
    "forward", "input_grad", "weight_grad", "full_backward", "output_bytes", "kept_bytes", "kept_until_weight_bytes"
)  # fmt: skip


def scaled(profile: Profile, samples: int) -> Profile:
    """Return a profile of so many rows, in proportion; small micro-batches use a device worse than that."""
    if samples < 1:
        raise InputError("a micro-batch of at least 1 row", samples, "ask for more")
    if samples == profile.samples:
        return profile
    factor = samples / profile.samples

    def grown(layer: Layer) -> Layer:
        return replace(layer, **{name: getattr(layer, name) * factor for name in BY_ROWS})

    sent = tuple(replace(one, bytes=one.bytes * factor) for one in profile.sent)
    return replace(profile, layers=tuple(map(grown, profile.layers)), samples=samples, sent=sent)
