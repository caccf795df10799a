"""The whole model's state under its own names: gather it from the stages, load it into them, find tied names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError
from penstock.model.split import Split
from penstock.model.walk import is_walking
from penstock.training.processes import Ranks, share


def buffers_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a state dict, under all of their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return every further name of a parameter, with its first."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers, tied ones under each name; raise for a state with anything else."""
    refuse_extra_state(model)
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(buffers_of(model))
    other = sorted(state.keys() ^ model.state_dict(keep_vars=True).keys())
    if other:
        came = f"a state_dict() that is changed by a hook of the model's own: {', '.join(other[:5])}"
        raise InputError("a model whose state is its parameters and buffers", came, "take the hook off")
    return state


def refuse_extra_state(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise InputError(
                "a model whose state is parameters and buffers",
                f"extra state of its own in {name or 'the model itself'}",
                "keep it in a buffer",
            )


def whole_state(ranks: Ranks, split: Split) -> dict[str, Any]:
    """Return every parameter and buffer, on every rank."""
    state = dict(split.model.state_dict())
    if ranks.alone:
        return state
    device = next((t.device for t in state.values() if isinstance(t, torch.Tensor) and not t.is_meta), None)
    for name, rank in homes(ranks, split).items():
        if name in state:
            tensor = state[name]
            state[name] = tensor if not tensor.is_meta else torch.empty_like(tensor, device=device or "cpu")
            share(ranks, state[name], rank)
    return state


def take_state(split: Split, state: dict[str, Any]) -> None:
    """Load a whole model's state; each rank loads the tensors that it has."""
    model = split.model
    if not any(t.is_meta for t in model.state_dict().values() if isinstance(t, torch.Tensor)):
        model.load_state_dict(state)
        return
    own = model.state_dict()
    missing, strange = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or strange:
        raise InputError(
            "the state of this model", f"missing {missing}, unknown {strange}", "load the model's own state"
        )
    for name, tensor in own.items():
        if isinstance(tensor, torch.Tensor) and tensor.shape != state[name].shape:
            raise InputError(
                f"{name!r} of shape {tuple(tensor.shape)}", tuple(state[name].shape), "load the model's own state"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                tensor.copy_(state[name])


def homes(ranks: Ranks, split: Split) -> dict[str, int]:
    """Return the rank that has the current value of each tensor of the state, by name."""
    first = {id(p): name for name, p in split.model.named_parameters()}
    by_name = {
        name: ranks.placement[split.owner[first[id(p)]]]
        for name, p in split.model.named_parameters(remove_duplicate=False)
    }
    stages = split.buffer_stages()
    for name, _ in split.model.named_buffers(remove_duplicate=False):
        by_name[name] = ranks.placement[stages.get(name, 0)]
    return dict(sorted(by_name.items()))  # in an order that all ranks have


def release(model: nn.Module, keep: list[nn.Parameter]) -> None:
    """Free the weights of other ranks' stages, which would become stale; their names and shapes remain."""
    kept = set(map(id, keep))
    hollow: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in kept and not parameter.is_meta:
                if id(parameter) not in hollow:
                    empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                    hollow[id(parameter)] = empty
                module._parameters[name] = hollow[id(parameter)]


def guard(split: Split) -> None:
    """Make a direct call of the model, whose weights are partly on other ranks, raise a clear error."""
    for module in split.model.modules():
        if id(module) not in split.layout.opened and _absent(module):
            module.register_forward_pre_hook(_refuse_absent)


def _absent(module: nn.Module) -> list[str]:
    return [name for name, parameter in module._parameters.items() if parameter is not None and parameter.is_meta]


def _refuse_absent(module: nn.Module, args: Any) -> None:
    absent = _absent(module)
    if absent and not is_walking():
        raise InputError(
            "a call of the pipeline, as each rank has the weights of its own stages alone",
            f"a call of the model, whose {type(module).__name__} has its {absent[0]} on another rank",
            "call pipe.forward(inputs), or pipe.evaluate(loader), on every rank; pipe.state_dict() has all weights",
        )
