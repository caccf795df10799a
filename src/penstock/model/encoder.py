"""torch's TransformerEncoder in eval mode, cut into stages.

With a padding mask and without gradients, it packs the rows into a nested tensor without padding, runs its layers on
that, and fills the padding with zeros before its last norm. A nested tensor cannot be sent, and the choice depends on
devices. So a walk runs the layers on padded rows, as in training, and fills in the zeros, which gives the numbers of
the plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn

_Call = Callable[..., Any]


def is_encoder(module: nn.Module) -> TypeGuard[nn.TransformerEncoder]:
    """Whether a module's forward is torch's own."""
    return isinstance(module, nn.TransformerEncoder) and type(module).forward is nn.TransformerEncoder.forward


def padded(call: _Call, module: nn.TransformerEncoder, *args: Any, **kwargs: Any) -> Any:
    """Call an encoder without nested tensors; `call` calls a module."""
    given = dict(zip(("src", "mask", "src_key_padding_mask", "is_causal"), args, strict=False)) | kwargs
    src: Any = given.get("src")
    padding: Any = given.get("src_key_padding_mask")
    tensors = isinstance(src, torch.Tensor) and isinstance(padding, torch.Tensor)
    if not tensors or given.get("mask") is not None or not _packs(module, src):
        with _without(module, norm=False):
            return call(module, *args, **kwargs)
    with _without(module, norm=True):
        made = call(module, *args, **kwargs)
    empty = padding.bool()
    behind = (empty[:, :-1] <= empty[:, 1:]).all()  # only rows with padding at the end are packed
    empty = empty & behind & (not torch.is_autocast_enabled())
    made = made.masked_fill(empty.unsqueeze(-1), 0.0)
    return made if module.norm is None else module.norm(made)


def _packs(module: nn.TransformerEncoder, src: torch.Tensor) -> bool:
    """Whether the plain model packs rows with a padding mask, as far as this depends neither on data nor on devices."""
    first: Any = module.layers[0]
    if first.training or src.dim() != 3 or not getattr(module, "use_nested_tensor", False):
        return False
    if not torch.backends.mha.get_fastpath_enabled():
        return False
    return not torch.is_grad_enabled() or not any(t.requires_grad for t in (*first.parameters(), src))


@contextmanager
def _without(module: nn.TransformerEncoder, norm: bool) -> Iterator[None]:
    """Disable nested tensors and, with `norm`, the last norm. Attributes are set directly, as walks observe setattr."""
    kept, last = vars(module).get("use_nested_tensor"), module._modules.get("norm")
    vars(module)["use_nested_tensor"] = False
    if norm and last is not None:
        module._modules["norm"] = None
    try:
        yield
    finally:
        vars(module)["use_nested_tensor"] = kept
        if last is not None:
            module._modules["norm"] = last
