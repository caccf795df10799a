"""The steps that lead from a weight to its view, found when the view is saved and repeated on another weight.

Autograd's nodes keep what is needed to go backward through a view, and that is enough to go forward through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Step = Callable[[torch.Tensor], torch.Tensor]
CAST = "ToCopyBackward0"


def steps_to(tensor: torch.Tensor) -> tuple[nn.Parameter, list[Step]] | None:
    """Return the parameter and the views and casts that lead from it to a tensor; None where anything else does."""
    found = _source(tensor.grad_fn)
    if found is None:
        return None
    node: Any = tensor.grad_fn
    output, steps = tensor.output_nr, list[Step]()
    while node is not None and parameter_of(node) is None:
        steps.append(_READ[node.name()](node, output))
        node, output = node.next_functions[0]
    return found, steps[::-1]


def _source(node: Any) -> nn.Parameter | None:
    """Return the parameter behind views and casts; None for most tensors, so this has to be fast."""
    while node is not None:
        if node.name() not in _READ:
            return parameter_of(node)
        node = node.next_functions[0][0]
    return None


def parameter_of(node: Any) -> nn.Parameter | None:
    """Return the parameter whose gradient a node accumulates."""
    found = getattr(node, "variable", None)
    return found if isinstance(found, nn.Parameter) else None


def _shaped(method: str) -> Callable[[Any, int], Step]:
    """Return a step to the shape that the node records."""

    def read(node: Any, output: int) -> Step:
        shape = tuple(node._input_metadata[output].shape)
        return lambda t: getattr(t, method)(shape)

    return read


def _given(method: str, *names: str, many: bool = False) -> Callable[[Any, int], Step]:
    """Return a step with the arguments that the node saved under these names; `many`: it returns one of several
    tensors."""

    def read(node: Any, output: int) -> Step:
        kept = [_signed(getattr(node, f"_saved_{name}")) for name in names]
        return lambda t: getattr(t, method)(*kept)[output] if many else getattr(t, method)(*kept)

    return read


def _sliced(node: Any, _: int) -> Step:
    kept = [_signed(getattr(node, f"_saved_{name}")) for name in ("dim", "start", "end", "step")]
    return lambda t: torch.ops.aten.slice(t, *kept)


def _cast(node: Any, output: int) -> Step:
    dtype = node._input_metadata[output].dtype
    return lambda t: t.to(dtype)


def _signed(number: Any) -> Any:
    """Return a dimension that autograd saved as an unsigned number."""
    if isinstance(number, (tuple, list)):
        return tuple(map(_signed, number))
    return number - 2**64 if number >= 2**63 else number


_READ: dict[str, Callable[[Any, int], Step]] = {
    CAST: _cast,
    "TBackward0": _given("t"),
    "TransposeBackward0": _given("transpose", "dim0", "dim1"),
    "PermuteBackward0": _given("permute", "dims"),
    "ViewBackward0": _shaped("view"),
    "UnsafeViewBackward0": _shaped("view"),
    "ReshapeAliasBackward0": _shaped("view"),
    "ExpandBackward0": _shaped("expand"),
    "SliceBackward0": _sliced,
    "SelectBackward0": _given("select", "dim", "index"),
    "UnsqueezeBackward0": _given("unsqueeze", "dim"),
    "SqueezeBackward0": _shaped("view"),
    "SqueezeBackward1": _given("squeeze", "dim"),
    "SqueezeBackward2": _given("squeeze", "dim"),
    "SplitBackward0": _given("split", "split_size", "dim", many=True),
    "SplitWithSizesBackward0": _given("split", "split_sizes", "dim", many=True),
    "UnbindBackward0": _given("unbind", "dim", many=True),
    "AliasBackward0": lambda node, output: lambda t: t,
}
