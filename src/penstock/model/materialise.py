"""Models too large to be built whole: built without weights, and given those of one stage.

    with weightless():
        model = Model(config)               # parameters take no memory; buffers are real

Such a model can be traced and split; a rank then materialises the stages it runs, from a state dict, a file or the
layers' own initialisation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError, SplitError

Load = Callable[[str], torch.Tensor]  # returns the values of a parameter by its name in the model


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Free the memory of every parameter that is registered within the context; buffers keep theirs.

    A model built on the meta device would also lose the buffers that its layers compute and that no state dict
    contains, such as the frequencies of rotary embeddings.
    """
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign,assignment]
    try:
        with _no_initialisation():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextlib.contextmanager
def _no_initialisation() -> Iterator[None]:
    """Skip the initialisation of weights without memory, which only costs time."""
    names = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]
    kept = {name: getattr(nn.init, name) for name in names}

    def unless_meta(fill: Callable[..., Any]) -> Callable[..., Any]:
        def filled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return tensor if tensor.is_meta else fill(tensor, *args, **kwargs)

        return filled

    for name, fill in kept.items():
        setattr(nn.init, name, unless_meta(fill))
    try:
        yield
    finally:
        for name, fill in kept.items():
            setattr(nn.init, name, fill)


def is_weightless(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def materialise(
    model: nn.Module, names: Iterable[str], device: torch.device | str | None = None, load: Load | None = None
) -> None:
    """Allocate the parameters named, under every name they have, on a device (default: torch's).

    Values come from `load`, or else from `reset_parameters` of the layers they belong to.
    """
    wanted = set(names)
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    fresh: dict[str, nn.Parameter] = {}
    for same in aliases.values():
        if wanted.intersection(same) and model.get_parameter(same[0]).is_meta:
            old = model.get_parameter(same[0])
            new = nn.Parameter(
                torch.empty_like(old, device=device or torch.get_default_device()), requires_grad=old.requires_grad
            )
            for name in same:
                owner, _, leaf = name.rpartition(".")
                model.get_submodule(owner)._parameters[leaf] = new
            fresh[same[0]] = new
    if load is not None:
        with torch.no_grad():
            for name, parameter in fresh.items():
                parameter.copy_(_loaded(load, name, parameter))
        return
    _initialise(model, set(fresh))


def fill_buffers(model: nn.Module, device: torch.device, load: Load | None) -> None:
    """Fill buffers that were built on the meta device; only those of the state dict can be loaded."""
    saved = model.state_dict(keep_vars=True)
    for name, buffer in dict(model.named_buffers()).items():
        if not buffer.is_meta:
            continue
        if load is None or name not in saved:
            raise SplitError(
                "buffers with values, or load= for those that are in the state dict",
                f"{name!r} on the meta device",
                "build the model under penstock.model.materialise.weightless(), which keeps buffers",
            )
        owner, _, leaf = name.rpartition(".")
        values = torch.empty_like(buffer, device=device)
        model.get_submodule(owner)._buffers[leaf] = values.copy_(_loaded(load, name, buffer))


def read_later(name: str) -> torch.Tensor:
    """Return placeholders as a `load` function: the weights are read from a file once the pipeline is built."""
    raise AssertionError(f"{name} is not asked for one by one")


def _loaded(load: Load, name: str, wanted: torch.Tensor) -> torch.Tensor:
    values = torch.zeros(()).expand(wanted.shape) if load is read_later else load(name)
    if isinstance(values, torch.Tensor) and values.shape == wanted.shape and not values.is_meta:
        return values
    came = f"one of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
    came = f"{came} on the meta device" if isinstance(values, torch.Tensor) and values.is_meta else came
    raise InputError(
        f"load({name!r}) to give a tensor of shape {tuple(wanted.shape)}", came, "load the model's own state"
    )


def _initialise(model: nn.Module, names: set[str]) -> None:
    """Call the initialisation of each layer that owns a new parameter."""
    for owner in sorted({name.rpartition(".")[0] for name in names}):
        module = model.get_submodule(owner)
        reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        missing = [name for name, p in module.named_parameters(recurse=False) if p.is_meta]
        if reset is None or missing:
            raise SplitError(
                f"{owner or 'the model'} to have reset_parameters() for its own parameters",
                f"{type(module).__name__} without" if reset is None else f"{missing} still without memory",
                "give load=, a function from a parameter's name to its values",
            )
        reset()
