"""The model of digits.toml: 64 grey values in, scores of ten digits out."""

from __future__ import annotations

from torch import nn


def make_model(width: int, layers: int) -> nn.Module:
    middle = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *middle, nn.Linear(width, 10))
