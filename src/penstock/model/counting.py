"""Properties of the operations in a walk: their FLOPs, writes to weights, and a hash to compare them by."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from penstock.model.written import Written

_whole: set[Any] = {torch.ops.prim.device.default}  # operations that torch does not decompose
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, type)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts FLOPs by torch's formulas (torch's own counter would put hooks on modules and tensors) and
    reports writes to weights."""

    def __init__(self, written: Written) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total, self.written, self.mark = 0.0, written, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)
        with torch._C.DisableTorchFunction():  # these are not calls of the model
            if formula is None and func not in _whole:
                with self:
                    parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
                _whole.add(func)  # most are: from now on they are not decomposed
            if func._schema.is_mutable:
                self.written.operation(func, args, kwargs)
            result = func(*args, **kwargs)
        if formula is not None:
            self.total += float(formula(*args, **kwargs, out_val=result))
        self.mark = hash((self.mark, func, _outline(args), _outline(tuple(kwargs.values()))))
        return result


def _outline(value: Any) -> Any:
    """Return the properties of an operator's argument without its data."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.requires_grad
    if isinstance(value, (tuple, list)):
        return tuple(map(_outline, value))
    return value if isinstance(value, PLAIN) else type(value)
