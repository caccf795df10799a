"""The names of a model's state, as its own `state_dict` has them, and which of them are one and the same weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from penstock.errors import InputError


def buffers_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state dict has, under all of their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter, with its first."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of the state, a tied one under each of its names. Refuses a state with more in it."""
    refuse_extra_state(model)
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(buffers_of(model))
    other = sorted(found.keys() ^ model.state_dict(keep_vars=True).keys())
    if other:
        came = f"a state_dict() that is changed by a hook of the model's own: {', '.join(other[:5])}"
        raise InputError("a model whose state is its parameters and buffers", came, "take the hook off")
    return found


def refuse_extra_state(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise InputError(
                "a model whose state is parameters and buffers",
                f"extra state of its own in {name or 'the model itself'}",
                "keep it in a buffer",
            )
