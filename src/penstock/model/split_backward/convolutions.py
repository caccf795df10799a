"""Stand-ins for the convolutions of one to three dimensions, and their transposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.model.split_backward import threads
from penstock.model.split_backward.deferred import defer
from penstock.model.split_backward.eligible import as_autocast, can_wait
from penstock.model.split_backward.operations import Convolution

Numbers = int | Sequence[int]


def convolution(torchs: Callable[..., Tensor], dimensions: int) -> Callable[..., Tensor]:
    """Return a stand-in for `torch.conv1d`, `conv2d` or `conv3d`."""

    def stand_in(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Numbers = 1,
        padding: str | Numbers = 0,
        dilation: Numbers = 1,
        groups: int = 1,
    ) -> Tensor:
        rest = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return _convolve(torchs, dimensions, input, weight, bias, rest)

    return stand_in


def transposed_convolution(torchs: Callable[..., Tensor], dimensions: int) -> Callable[..., Tensor]:
    """Return a stand-in for `torch.conv_transpose1d`, `conv_transpose2d` or `conv_transpose3d`."""

    def stand_in(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Numbers = 1,
        padding: Numbers = 0,
        output_padding: Numbers = 0,
        groups: int = 1,
        dilation: Numbers = 1,
    ) -> Tensor:
        rest = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return _convolve(torchs, dimensions, input, weight, bias, {**rest, "output_padding": output_padding})

    return stand_in


def _convolve(
    torchs: Callable[..., Tensor], n: int, input: Tensor, weight: Tensor, bias: Tensor | None, rest: dict[str, Any]
) -> Tensor:
    if torch.compiler.is_compiling() or (queue := threads.current()) is None or not can_wait(input, weight, bias):
        return torchs(input, weight, bias, **rest)
    x, w, b = as_autocast(queue, input, weight, bias)
    batched = x.dim() == n + 2
    fits = w.dim() == n + 2 and (batched or x.dim() == n + 1) and x.numel() and x.dtype == w.dtype
    if not fits or (b is not None and b.dtype != w.dtype):
        return torchs(input, weight, bias, **rest)  # torch's rarer cases, and its errors
    dilation = _each(rest["dilation"], n)
    padding = _padding(rest["padding"], dilation, w.shape[2:])
    if padding is None:
        return torchs(input, weight, bias, **rest)
    operation = Convolution(
        stride=_each(rest["stride"], n),
        padding=padding,
        dilation=dilation,
        transposed="output_padding" in rest,
        output_padding=_each(rest.get("output_padding", 0), n),
        groups=rest["groups"],
        bias_size=None if b is None else [b.size(0)],
    )
    y = defer(queue, operation, x if batched else x.unsqueeze(0), w, b)
    return y if batched else y.squeeze(0)


def _each(setting: Numbers, n: int) -> list[int]:
    several = [setting] if isinstance(setting, int) else list(setting)
    return several * n if len(several) == 1 else several


def _padding(padding: str | Numbers, dilation: list[int], kernel: Sequence[int]) -> list[int] | None:
    """Return numbers for `padding`; None where "same" would pad one side more than the other."""
    if not isinstance(padding, str):
        return _each(padding, len(kernel))
    if padding == "valid":
        return [0] * len(kernel)
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return None if padding != "same" or any(t % 2 for t in total) else [t // 2 for t in total]
