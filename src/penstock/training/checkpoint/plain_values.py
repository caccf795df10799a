"""Plain values as JSON and back: numbers, strings, lists, tuples, dicts, small tensors, and random states.

Nothing in them can run. The random states are those that a script draws from to shuffle or augment; stages seed for
themselves.
"""

from __future__ import annotations

import base64
import random
from collections import Counter
from math import prod
from typing import Any

import numpy as np
import torch

from penstock.errors import InputError
from penstock.training.processes import raw

KIND = "kind"  # marks what is not a value of JSON's own


def written(value: Any, where: str) -> Any:
    """Return a value as JSON; `where` names it in the error if it cannot be written."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return written(value.item(), where)
    if isinstance(value, list):
        return [written(part, where) for part in value]
    if isinstance(value, tuple):
        return {KIND: "tuple", "of": [written(part, where) for part in value]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {KIND: kind, "of": [[written(k, where), written(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return {KIND: "tensor", "type": name, "shape": list(value.shape), "of": base64.b64encode(raw(value)).decode()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {KIND: "array", "type": str(value.dtype), "of": value.tolist()}
    raise InputError(
        f"{where} to be made of numbers, words, lists, dicts and tensors",
        type(value).__name__,
        "a checkpoint holds plain values only: keep such an object out of the state",
    )


def read(value: Any) -> Any:
    """Decode a value that `written` has encoded; raise one of Python's or torch's own errors for others."""
    if isinstance(value, list):
        return [read(part) for part in value]
    if not isinstance(value, dict):
        return value
    of = value["of"]
    if value[KIND] == "tuple":
        return tuple(read(part) for part in of)
    if value[KIND] in ("dict", "counter"):
        pairs = {read(k): read(v) for k, v in of}
        return Counter(pairs) if value[KIND] == "counter" else pairs
    if value[KIND] == "array":
        dtype = np.dtype(value["type"])
        if dtype.kind not in "biuf":
            raise ValueError(f"an array of type {value['type']!r}")
        return np.array(of, dtype=dtype)
    if value[KIND] == "tensor":
        return _tensor(bytearray(base64.b64decode(of)), value["shape"], dtype_of(value["type"]))
    raise ValueError(f"a value of kind {value[KIND]!r}")


def _tensor(data: bytearray, shape: list[Any], dtype: torch.dtype) -> torch.Tensor:
    if any(type(size) is not int or size < 0 for size in shape) or prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"a tensor of shape {shape} and type {dtype} in {len(data)} bytes")
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def dtype_of(name: Any) -> torch.dtype:
    """Return a tensor type by its name, such as float32."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor of type {name!r}")
    return dtype


def random_states(device: torch.device) -> Any:
    """Return the states of all random generators as JSON."""
    states: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return written(states, "the random states")


def require_random_states(states: dict[str, Any]) -> None:
    """Raise for states that a generator does not take, tried on new generators."""
    torch.Generator().set_state(states["torch"])
    random.Random().setstate(states["python"])
    np.random.RandomState().set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.Generator("cuda").set_state(states["cuda"])


def set_random_states(encoded: Any, device: torch.device) -> None:
    states = read(encoded)
    torch.default_generator.set_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
