"""All that a model is, and all around it that running it may change, as values to compare: before and after a call that
promises to leave both as they were.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
import torch._dynamo  # replaces some of torch's functions when it is first asked for
import torch.nn.functional as F
from torch import nn

DEEP = 6  # containers inside containers


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Of each module its attributes, hooks, buffers and parameters; of the process its random states and functions."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute, value in vars(module).items():
            found[f"{name or 'model'}.{attribute}"] = _of(value, DEEP)
        for kind in type(module).__mro__:
            found[f"class {kind.__module__}.{kind.__qualname__}"] = _of(dict(vars(kind)), 1)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[f"{name} itself"] = id(parameter)
        found[f"{name}.grad"] = (id(parameter.grad), _of(parameter.grad, 1))
        found[f"{name}'s hooks"] = _of(parameter._backward_hooks, 1), _of(_after_accumulation(parameter), 1)
    return found | _process()


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What has another value now, has come or has gone."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _process() -> dict[str, Any]:
    return {
        "random": random.getstate(),
        "numpy.random": [_of(part, 1) for part in np.random.get_state()],
        "torch.random": torch.get_rng_state().tolist(),
        "torch's modes": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        **_functions(torch, F, random),
    }


def _functions(*modules: Any) -> dict[str, Any]:
    """Python's functions and C's; torch loads more of its classes and modules when they are first asked for."""
    kinds = (FunctionType, BuiltinFunctionType, MethodType)
    return {
        f"{module.__name__}.{name}": id(value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, kinds)
    }


def _after_accumulation(parameter: nn.Parameter) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def _of(value: Any, deep: int) -> Any:
    """Values where they can be compared, identities of everything else."""
    if isinstance(value, torch.Tensor):
        kept = (id(value), str(value.dtype), tuple(value.shape), value.requires_grad, value.is_leaf)
        return (
            *kept,
            "meta" if value.is_meta else value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return (type(value).__name__, repr(value))
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if not deep or isinstance(value, (nn.Module, type)):
        return [(key, id(held)) for key, held in value.items()] if isinstance(value, dict) else id(value)
    if isinstance(value, (dict, OrderedDict)):
        return [(repr(key), _of(held, deep - 1)) for key, held in value.items()]
    if isinstance(value, (list, tuple)):
        return [_of(held, deep - 1) for held in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    return id(value), _of(vars(value), deep - 2) if hasattr(value, "__dict__") and deep > 2 else None
