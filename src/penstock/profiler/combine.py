"""Combine the profiles of one model by several processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from penstock.core.profile import Layer, PerStage, Profile

MEASURED = ("forward", "input_grad", "weight_grad", "full_backward", "update", "spread")


def combine_profiles(profiles: Sequence[Profile]) -> Profile:
    """Return a profile with the medians of all measured figures; the rest is the same in all."""
    first = profiles[0]
    layers = tuple(_layer([profile.layers[at] for profile in profiles]) for at in range(len(first.layers)))
    own = [profile.per_stage for profile in profiles]
    per_stage = PerStage(*(median(getattr(one, name) for one in own) for name in ("forward", "backward", "update")))
    newest, jitter = (median(getattr(profile, name) for profile in profiles) for name in ("newest", "jitter"))
    return replace(first, layers=layers, per_stage=per_stage, busy=len(profiles), newest=newest, jitter=jitter)


def _layer(layers: Sequence[Layer]) -> Layer:
    return replace(layers[0], **{name: median(getattr(layer, name) for layer in layers) for name in MEASURED})
