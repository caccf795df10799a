"""What autograd saves of a weight, had again from the weights that the backward finds.

For training whose backward uses other weights than its forward. A weight itself, a view of it and a cast of it are kept
as a recipe and made anew from `.data` as it then is. A weight that other operations were done to (`exp`, weight_norm,
`.contiguous()`) is a copy whose making cannot be repeated here, and a user's own checkpoint hides what it saves: both
are refused by name. A copy that a custom Function makes inside itself cannot be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as torchs
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import SplitError
from penstock.model.offload import to_device, to_host, within
from penstock.model.walk import users_line

Recipe = Callable[[], torch.Tensor]

CAST = "ToCopyBackward0"
VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in (
        "T", "Transpose", "Permute", "View", "ReshapeAlias", "UnsafeView", "Expand", "AsStrided", "Slice", "Select",
        "Squeeze", "Unsqueeze", "Split", "SplitWithSizes", "Unbind", "Alias", "Narrow", "Chunk", "Detach", "Numpy_t",
    )
    for number in (0, 1, 2)
)  # fmt: skip
# Functions of their tensors alone: what they make of weights is nothing but weights. Indexing by data is none.
PURE = frozenset(
    f"{name}Backward{number}"
    for name in (
        "Exp", "Log", "Log1P", "Clone", "Mul", "Div", "Pow", "Sqrt", "Rsqrt", "Softplus", "Tanh", "Sigmoid", "Softmax",
        "Sub", "Add", "Neg", "Abs", "Sum", "Mean", "Cat", "Stack", "Where", "Clamp", "Relu", "Mm", "Mv", "Dot",
        "WeightNormInterface", "LinalgVectorNorm", "Norm", "Sin", "Cos", "Square", "LinalgQr", "Tril", "Triu",
    )
    for number in (0, 1, 2)
)  # fmt: skip


class Reweigh:
    """Makes the recipes of one stage."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], keep_on_host: bool = False) -> None:
        self.names = {parameter: name for name, parameter in named}
        self.keep_on_host = keep_on_host

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a forward."""
        owners = {p.untyped_storage().data_ptr(): p for p in self.names if p.numel()}

        def pack(tensor: torch.Tensor) -> Recipe:
            with torch._C.DisableTorchFunction():  # a walk would take these for functions that the model calls
                return self._recipe(tensor, owners)

        def unpack(recipe: Any) -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                return recipe()  # type: ignore[no-any-return]

        with saved_tensors_hooks(pack, unpack), _without_checkpoints():
            yield

    def _recipe(self, tensor: torch.Tensor, owners: dict[int, nn.Parameter]) -> Recipe:
        if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
            return lambda: tensor
        owner = owners.get(tensor.untyped_storage().data_ptr())
        if owner is not None and owner.dtype is tensor.dtype and within(tensor, owner):
            offset, size, stride = tensor.storage_offset() - owner.storage_offset(), tensor.size(), tensor.stride()
            return lambda: owner.detach().as_strided(size, stride, owner.storage_offset() + offset)
        made = self._cast(tensor)
        if made is not None:
            return made
        self._refuse_derived(tensor)
        if self.keep_on_host:
            kept, device = to_host(tensor), tensor.device
            return lambda: to_device(kept, device)
        return lambda: tensor

    def _cast(self, tensor: torch.Tensor) -> Recipe | None:
        """Of a weight in another type, or a view of that."""
        node = tensor.grad_fn
        while node is not None and node.name() in VIEWS:
            node = node.next_functions[0][0]
        if node is None or node.name() != CAST:
            return None
        owner = _parameter(node.next_functions[0][0])
        if owner is None or owner not in self.names:
            return None
        size, stride, offset, dtype = tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype
        return lambda: owner.detach().to(dtype).as_strided(size, stride, offset)

    def _refuse_derived(self, tensor: torch.Tensor) -> None:
        sources = _sources(tensor.grad_fn, tensor.numel())
        names = sorted({self.names[source] for source in sources if source in self.names}) if sources else []
        if names:
            assert tensor.grad_fn is not None
            raise SplitError(
                "weights that operators use as they are, as views or as casts: the backward is given other ones",
                f"{tensor.grad_fn.name().rstrip('0123456789').removesuffix('Backward')} of {', '.join(names)}",
                "use a schedule whose backward sees the forward's weights: pipedream or 2bw",
            )


class _Refused:
    """In place of what torch's checkpoints are made of: the kind that recomputes under hooks, and the older one."""

    def __init__(self, *_: Any) -> None:
        self.apply()

    @staticmethod
    def apply(*_: Any) -> None:
        raise SplitError(
            "no checkpoint of the model's own, because its backward would not see the weights that it should",
            f"one at {users_line()}",
            "take it out and use recompute='always', or a schedule whose backward sees the forward's weights",
        )


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    before = torchs._checkpoint_hook, torchs.CheckpointFunction
    torchs._checkpoint_hook, torchs.CheckpointFunction = _Refused, _Refused  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torchs._checkpoint_hook, torchs.CheckpointFunction = before  # type: ignore[misc]


def _parameter(node: Any) -> nn.Parameter | None:
    found = getattr(node, "variable", None)
    return found if isinstance(found, nn.Parameter) else None


def _sources(node: Any, numbers: int) -> set[nn.Parameter]:
    """The parameters that a tensor of so many numbers was made of, where it was made of nothing else."""
    found: set[nn.Parameter] = set()
    left, seen, unsure = [node] if node is not None else [], set(), False
    while left:
        at = left.pop()
        if at in seen:
            continue
        seen.add(at)
        parameter = _parameter(at)
        if parameter is not None:
            found.add(parameter)
            continue
        if at.name() not in VIEWS and at.name() != CAST and at.name() not in PURE:
            return set()
        for before, _ in at.next_functions:
            unsure = unsure or before is None  # a plain number, or data
            left += [] if before is None else [before]
    # Data has rows: what is made of it is larger than a weight.
    return set() if unsure and numbers > max((p.numel() for p in found), default=0) else found
