"""Keep weights that autograd saves as recipes, so that the backward uses the current weights.

This is for training whose backward uses other weights than its forward. A weight, a view of it and a cast of it are
saved as a recipe and recomputed from `.data` in the backward. A weight that went through other operations (`exp`,
weight_norm, `.contiguous()`) is a copy that cannot be recomputed here, and a user's checkpoint hides what it saves:
both are refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as torchs
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import SplitError
from penstock.model.offload import to_device, to_host
from penstock.model.origins import Made, Origins
from penstock.model.view_steps import CAST, parameter_of, steps_to
from penstock.model.walk import users_line

Recipe = Callable[[], torch.Tensor]

VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in (
        "T", "Transpose", "Permute", "View", "ReshapeAlias", "UnsafeView", "Expand", "AsStrided", "Slice", "Select",
        "Squeeze", "Unsqueeze", "Split", "SplitWithSizes", "Unbind", "Alias", "Narrow", "Chunk", "Detach", "Numpy_t",
        "ViewAsReal", "ViewAsComplex", "Conj", "Diagonal", "Unfold", "Swapaxes", "Movedim",
    )
    for number in (0, 1, 2)
)  # fmt: skip
# Functions that derive weights from weights. Other results of weights alone (a lookup, a layer on learned queries) are
# rather the start of activations, which belong to the forward.
PURE = frozenset(
    f"{name}Backward{number}"
    for name in (
        "Exp", "Exp2", "Expm1", "Log", "Log1P", "Log2", "Clone", "Copy", "Repeat", "Flip", "Roll", "Mul", "Div", "Pow",
        "Sqrt", "Rsqrt", "Reciprocal", "Softplus", "Tanh", "Sigmoid", "LogSigmoid", "Softmax", "LogSoftmax", "Silu",
        "Gelu", "Elu", "LeakyRelu", "Relu", "Hardtanh", "Clamp", "Maximum", "Minimum", "Sub", "Rsub", "Add", "Neg",
        "Abs", "Sign", "Sgn", "Round", "Floor", "Sin", "Cos", "Square", "Lerp", "Addcmul", "Addcdiv", "Sum", "Mean",
        "Std", "Var", "Prod", "Cumsum", "Cat", "Stack", "Where", "Tril", "Triu", "MaskedFill", "Mm", "Mv", "Dot",
        "Vdot", "Bmm", "WeightNormInterface", "LinalgVectorNorm", "Norm", "LinalgQr", "LinalgMatrixExp",
        "LinalgHouseholderProduct", "LinalgInvEx", "LinalgSolveEx", "FftR2C", "FftC2R", "FftC2C",
    )
    for number in (0, 1, 2, 3)
)  # fmt: skip


class Reweigh:
    """The recipes of one stage's weights. `constants` are the model's buffers."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        keep_on_host: bool = False,
        constants: Iterable[torch.Tensor] = (),
    ) -> None:
        self.names = {parameter: name for name, parameter in named}
        self.keep_on_host, self.constants = keep_on_host, list(constants)
        self.looked_at: dict[int, object] = {}  # checked paths, by id()
        # cuDNN's recurrent layers use one copy of all their weights; torch's own do not.
        self.recurrent = any(p.is_cuda and ".weight_ih_l" in f".{name}" for p, name in self.names.items())

    @contextmanager
    def saving(self, path: object) -> Iterator[None]:
        """Save weights as recipes in a forward. The first forward on a path is checked for weights derived from
        weights."""
        trained = [parameter for parameter in self.names if parameter.requires_grad]
        owners: dict[int, list[nn.Parameter]] = {}
        for parameter in trained:
            if parameter.numel():
                owners.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
        origins = None
        if id(path) not in self.looked_at:
            frozen = [parameter for parameter in self.names if not parameter.requires_grad]  # equal for any backward
            origins = Origins(trained, [*self.constants, *frozen])

        def pack(tensor: torch.Tensor) -> Recipe:
            with torch._C.DisableTorchFunction():  # a walk would take these for calls of the model
                return self._recipe(tensor, owners, origins)

        def unpack(recipe: Any) -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                return recipe()  # type: ignore[no-any-return]

        plain = torch.backends.cudnn.flags(enabled=False) if self.recurrent else nullcontext()
        with saved_tensors_hooks(pack, unpack), _without_checkpoints(), origins or nullcontext(), plain:
            yield
        self.looked_at[id(path)] = path

    def _recipe(self, tensor: torch.Tensor, owners: dict[int, list[nn.Parameter]], origins: Origins | None) -> Recipe:
        if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
            return lambda: tensor
        for owner in owners.get(tensor.untyped_storage().data_ptr(), ()):
            if _within(tensor, owner):
                return self._view(tensor, owner)
        made = self._cast(tensor)
        if made is not None:
            return made
        if origins is not None and (tensor.is_floating_point() or tensor.is_complex()):
            self._refuse_derived(tensor, origins.of(tensor))
        if self.keep_on_host:
            kept, device = to_host(tensor), tensor.device
            return lambda: to_device(kept, device)
        return lambda: tensor

    def _view(self, tensor: torch.Tensor, owner: nn.Parameter) -> Recipe:
        """Return the recipe of a view of a weight: the same place in its current `.data`."""
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        conjugate, negative = tensor.is_conj(), tensor.is_neg()
        turned = conjugate or negative
        if (size, stride, dtype, turned) == (owner.size(), owner.stride(), owner.dtype, False):
            return lambda: owner.detach()
        if torch._debug_has_internal_overlap(owner) != 0:  # other versions of it have another layout
            raise self._refusal("a view of a weight with gaps", [self.names[owner]])
        offset = _first(tensor) - _first(owner)
        if dtype == owner.dtype and not turned:
            return lambda: owner.detach().as_strided(size, stride, owner.storage_offset() + offset // dtype.itemsize)

        def again() -> torch.Tensor:
            now = owner.detach()
            start = (_first(now) + offset) // dtype.itemsize
            made = torch.empty(0, dtype=dtype, device=now.device).set_(now.untyped_storage(), start, size, stride)
            made = made.conj() if conjugate else made
            return torch._neg_view(made) if negative else made

        return again

    def _cast(self, tensor: torch.Tensor) -> Recipe | None:
        """Return the recipe of a cast of a weight or of its view, or of a view of the cast; None for other tensors."""
        found = steps_to(tensor)
        if found is None or found[0] not in self.names:
            return None
        owner, steps = found
        return lambda: functools.reduce(lambda made, step: step(made), steps, owner.detach())

    def _refuse_derived(self, tensor: torch.Tensor, made: Made | None) -> None:
        if made is not None and made.weights and (_derives(tensor.grad_fn) if tensor.grad_fn else _pure(made.by)):
            raise self._refusal(made.by, sorted(self.names[weight] for weight in made.weights))

    def _refusal(self, what: str, names: list[str]) -> SplitError:
        return SplitError(
            "weights that operators use as they are, as views or as casts: the backward is given other ones",
            f"{what} of {', '.join(names)}",
            "use a schedule whose backward sees the forward's weights: pipedream or 2bw",
        )


class _Refused:
    """A replacement for torch's checkpoints, both the kind that uses hooks and the older one, which raises."""

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


def _derives(node: Any) -> bool:
    """Whether a tensor was computed from weights only by functions that derive weights from weights."""
    left, seen = [node], set()
    while left:
        at = left.pop()
        if at in seen or parameter_of(at) is not None:
            continue
        seen.add(at)
        if at.name() not in VIEWS and at.name() != CAST and at.name() not in PURE:
            return False
        left += [before for before, _ in at.next_functions if before is not None]
    return True


def _pure(operation: str) -> bool:
    """Whether an operation without an autograd node, inside a Function or without gradients, derives weights from
    weights."""
    node = "".join(part.capitalize() for part in operation.strip("_").split("_")) + "Backward0"
    return node in PURE or node == CAST


def _within(tensor: torch.Tensor, owner: torch.Tensor) -> bool:
    """Whether a tensor lies in its owner's part of their storage, which is usually all of it."""
    if owner.numel() * owner.element_size() == owner.untyped_storage().nbytes():
        return True
    first, last = _span(tensor)
    begin, end = _span(owner)
    return begin <= first and last <= end


def _first(tensor: torch.Tensor) -> int:
    """Return the byte of its storage at which a tensor begins."""
    return int(tensor.storage_offset() * tensor.element_size())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes of its storage that a tensor covers."""
    first = _first(tensor)
    numbers = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int(first), int(first + numbers * tensor.element_size())
