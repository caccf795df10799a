"""Models too big to be built whole: made without their weights, and given those of one stage at a time.

    with weightless():
        model = Model(config)               # parameters take no memory; buffers are real

A model like that can be traced and split; a rank then materialises the stages it runs, from a state dict, a file or the
layers' own initialisation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError, SplitError

Load = Callable[[str], torch.Tensor]  # the weights of a parameter, by its name in the model


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Every parameter that is registered in here loses its memory at once; buffers keep theirs.

    A model built wholly on the meta device would have lost what its layers compute for themselves and keep in no state
    dict, such as the frequencies of rotary embeddings.
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
    """Layers fill their weights after registering them; on weights without memory that is only time."""
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
    """Give memory and values to the parameters named, under every name they have, on a device (torch's default one).

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
    """Give values to buffers that were built on the meta device; only those of the state dict can be loaded."""
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
    """A `load` for weights that are read when the pipeline stands, from a file."""
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
    """Let each layer that owns a fresh parameter fill all it has, as it does when it is built."""
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
