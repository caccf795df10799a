"""Import weights into a pipeline from a safetensors file, or from a transformers directory.

Each rank reads the tensors of its own stages. Every name of the file and of the model has to fit; one name of a tied
weight is enough. Nothing changes before all ranks have read everything that they need.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from penstock.errors import FormatError
from penstock.training.checkpoint.atomic import patient, same_path, together
from penstock.training.checkpoint.plain_values import dtype_of
from penstock.training.model_state import state_of, tied_names
from penstock.training.pipeline_parts import PipelineParts
from penstock.training.processes import raw
from penstock.training.weight_files.safetensors import Form, Weights

Tensors = dict[str, torch.Tensor]


def import_weights(pipe: PipelineParts, path: str | os.PathLike[str]) -> None:
    """Load the weights from a path. Every rank has to call, between two steps."""
    ranks, tensors = pipe.ranks, dict[str, torch.Tensor]()
    file = same_path(ranks, path)
    with patient(ranks):
        together(ranks, f"to read the weights {file}", lambda: tensors.update(_read(pipe.model, file)))
    state = state_of(pipe.model)
    with torch.no_grad():
        for name, values in tensors.items():
            state[name].copy_(values)


def _read(model: nn.Module, path: Path) -> Tensors:
    """Read this rank's tensors, by the model's names; a tied one by its first."""
    weights, state, tied = Weights(path), state_of(model), tied_names(model)
    names: dict[str, list[str]] = {name: [] for name in state if name not in tied}
    for name in state:
        if name in weights.forms:
            names[tied.get(name, name)].append(name)
    _require_all(path, weights, state, names)
    tensors: Tensors = {}
    for name, given in names.items():
        if not state[name].is_meta:
            tensors[name] = weights.read(given[0])
            _require_equal(path, weights, tensors[name], given)
    return tensors


def _require_all(path: Path, weights: Weights, state: Tensors, names: dict[str, list[str]]) -> None:
    """Raise one error with everything that does not fit."""
    faults = [f"missing {name}" for name, given in names.items() if not given]
    faults += [f"unknown {name}" for name in weights.forms if name not in state]
    for name in weights.forms.keys() & state.keys():
        there, here = weights.forms[name], Form(str(state[name].dtype).removeprefix("torch."), tuple(state[name].shape))
        if there.shape != here.shape or not _keeps_all(there.dtype, here.dtype):
            faults.append(f"{name} of {there}, here {here}")
    if faults:
        advice = "import weights of this model, in its types or in narrower ones that lose nothing"
        raise FormatError(str(path), "the weights of this model", "; ".join(sorted(faults)), advice)


def _require_equal(path: Path, weights: Weights, values: torch.Tensor, given: list[str]) -> None:
    """Raise for a tied weight with different values under its names."""
    for name in given[1:]:
        other = weights.read(name)
        if other.dtype != values.dtype or raw(other) != raw(values):
            expected = f"the same values for {given[0]} and {name}, which are one weight in this model"
            raise FormatError(str(path), expected, "different ones", "import weights of a model that ties them, too")


def _keeps_all(there: str, here: str) -> bool:
    """Return whether every value of one type is a value of the other."""
    if there == here:
        return True
    try:
        a, b = dtype_of(there), dtype_of(here)
    except ValueError:
        return False
    if a.is_floating_point and b.is_floating_point:
        x, y = torch.finfo(a), torch.finfo(b)
        return y.eps <= x.eps and y.max >= x.max and y.tiny <= x.tiny
    if a.is_floating_point or b.is_floating_point or a.is_complex or b.is_complex or torch.bool in (a, b):
        return False
    return torch.iinfo(b).min <= torch.iinfo(a).min and torch.iinfo(b).max >= torch.iinfo(a).max
