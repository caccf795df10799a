"""Check tensors before they are reduced, and describe what has to be equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.errors import InputError

ADDABLE = {
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
    torch.complex128, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
}  # fmt: skip


def require(tensors: Sequence[Tensor], device: str = "cpu") -> None:
    """Raise unless all are dense tensors on that kind of device."""
    for at, tensor in enumerate(tensors):
        wrapped = bool(
            is_traceable_wrapper_subclass(tensor)
        )  # such as a distributed tensor, which has no memory itself
        if tensor.layout != torch.strided or wrapped:
            layout = type(tensor).__name__ if wrapped else str(tensor.layout)
            do = "make it dense: an embedding with sparse=False, the local part of a distributed tensor"
            raise InputError("plain dense tensors to reduce over ranks", f"tensor {at} as {layout}", do)
        if tensor.device.type != device:
            do = "move it there, or open the reducer for its device"
            raise InputError(f"tensors on {device} to reduce over ranks", f"tensor {at} on {tensor.device}", do)


def require_addable(tensors: Sequence[Tensor]) -> None:
    for at, tensor in enumerate(tensors):
        if tensor.dtype not in ADDABLE:
            do = "convert it to a wider type"
            raise InputError("numbers that can be added up over ranks", f"tensor {at} of {_name(tensor.dtype)}", do)


def require_bounds(bounds: Sequence[int], ranks: Sequence[int], size: int) -> None:
    """Raise unless the bounds cut the elements into a part for each rank."""
    rising = all(a <= b for a, b in pairwise(bounds))
    if len(bounds) != len(ranks) + 1 or bounds[0] != 0 or bounds[-1] != size or not rising:
        raise InputError(
            f"{len(ranks) + 1} bounds that rise from 0 to {size}, the elements of the flat tensor",
            list(bounds),
            f"give the first element of the part of each of the {len(ranks)} ranks, and the end of the last",
        )


def require_part(part: Tensor, out: Tensor, start: int, stop: int) -> None:
    if part.dtype != out.dtype or part.numel() != stop - start:
        (wanted,), (came,) = (in_words([tensor]) for tensor in (out[start:stop], part))
        raise InputError(f"this rank's part as {wanted}", came, "give the part between its bounds")
    if not out.is_contiguous() or out.dim() != 1:
        raise InputError("a flat tensor to gather into", in_words([out])[0], "make it contiguous, of one dimension")


def in_words(tensors: Iterable[Tensor]) -> list[str]:
    return [f"{tuple(tensor.shape)} {_name(tensor.dtype)}" for tensor in tensors]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def digest(words: Sequence[str]) -> bytes:
    return hashlib.blake2b("\n".join(words).encode(), digest_size=16).digest()


def unlike(words: dict[int, list[str]]) -> InputError:
    """Return the first difference between the ranks: the reduction, then each tensor."""
    (first, own), *rest = sorted(words.items())
    for rank, other in rest:
        for at in range(max(len(own), len(other))):
            a, b = (said[at] if at < len(said) else "none" for said in (own, other))
            if a != b:
                return InputError(
                    f"the same reductions in the same order on ranks {', '.join(map(str, sorted(words)))}",
                    f"{_called(at)}{a} on rank {first} and {b} on rank {rank}",
                    "give the replicas of a stage the same model, of which the same weights have gradients",
                )
    raise AssertionError("ranks that differ in nothing")


def _called(at: int) -> str:
    return f"as tensor {at - 1} " if at else ""


def separate(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, or copies of those that are not contiguous or share memory with another."""
    dense = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    end = 0
    for at in sorted(range(len(dense)), key=lambda at: dense[at].data_ptr()):
        tensor = dense[at]
        if tensor.numel() and tensor.data_ptr() < end:
            dense[at] = tensor.clone()
        elif tensor.numel():
            end = tensor.data_ptr() + tensor.nbytes
    return dense


def mark_written(tensor: Tensor) -> None:
    """Tell autograd, as of any change in place."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
