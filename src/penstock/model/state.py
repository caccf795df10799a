"""The state that modules keep between forwards: buffers, counters, lists, averages, generators, hooks. It can be saved
and restored.

Tensors are saved as copies, made once for each version: unchanged ones cost only a comparison. But torch updates the
running averages of a batch norm without counting a version, so tensors that could be averages are copied each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.errors import SplitError
from penstock.model.fakes import is_fake
from penstock.model.holders import DICT, MODULE, OWN, PLAIN, Access, is_record, kind_of, look_module, same
from penstock.model.saved_hooks import Hooks, SavedHooks

LARGE = 2**26  # bytes; no copy of a larger tensor is kept, unless it changes
LONG = 10_000  # entries; longer containers are no longer checked once a step has not changed them
DEEP = 4  # depth of nested containers
_Look = tuple[Any, list[Any]]


class _Held(NamedTuple):
    """A holder and its content."""

    holder: Any
    kind: Access
    look: _Look


class _Copy(NamedTuple):
    tensor: torch.Tensor
    version: int
    values: torch.Tensor | None


class Saved(NamedTuple):
    """The state of some modules at one time."""

    held: list[_Held]
    tensors: list[_Copy]
    hooks: SavedHooks


class Copies:
    """Copies of tensors by id(), each of one version."""

    def __init__(self) -> None:
        self.known: dict[int, _Copy] = {}
        self.still: dict[int, Any] = {}  # large objects that a step has not changed

    def is_still(self, thing: Any) -> bool:
        return self.still.get(id(thing)) is thing

    def of(self, tensor: torch.Tensor) -> _Copy:
        version, found = _version(tensor), self.known.get(id(tensor))
        if found is not None and found.tensor is tensor and found.version == version and not _moves_unseen(tensor):
            return found
        without = tensor.is_meta or is_fake(tensor) or tensor.grad_fn is not None or self.is_still(tensor)
        fresh = self.known[id(tensor)] = _Copy(tensor, version, None if without else tensor.detach().clone())
        return fresh

    def settle(self, before: Saved) -> None:
        """After a step, drop the copies of large tensors that it has not changed, and of tensors that no longer
        exist."""
        alive = {id(copy.tensor) for copy in before.tensors}
        self.known = {key: copy for key, copy in self.known.items() if key in alive}
        for tensor, version, values in before.tensors:
            if _version(tensor) != version:
                self.still.pop(id(tensor), None)
            elif values is not None and values.numel() * values.element_size() > LARGE:
                self.still[id(tensor)] = tensor
                self.known[id(tensor)] = _Copy(tensor, version, None)
        for holder, kind, look in before.held:
            if len(look[1]) > LONG and same(kind.look(holder), look):
                self.still[id(holder)] = holder


class State:
    """The state of some modules."""

    def __init__(self, modules: Iterable[nn.Module], copies: Copies | None = None, more: Iterable[Any] = ()) -> None:
        self.modules = list({id(module): module for module in modules}.values())
        self.bare = [_Held(module._buffers, DICT, ([], [])) for module in self.modules]  # as it is without buffers
        self.more = list(more)  # generators that belong to no module
        self.copies = Copies() if copies is None else copies
        self.hooks = Hooks(self.modules)

    def save(self) -> Saved:
        found = _Found(self.copies)
        for module, bare in zip(self.modules, self.bare, strict=True):
            buffers = module._buffers
            if buffers or bare.holder is not buffers:
                found.reach(buffers, DEEP)
            else:  # the usual case, handled fast as this runs before every step
                found.held.append(bare)
            if not _is_torchs(module):
                found.module(module)
        for thing in self.more:
            found.reach(thing, DEEP)
        return Saved(found.held, found.tensors, self.hooks.save())

    def restore(self, before: Saved) -> None:
        """Undo every change since `before`."""
        self.hooks.restore(before.hooks)
        for held in before.held:
            _put(held)
        with torch.no_grad():
            for tensor, version, values in before.tensors:
                if values is not None and _changed(tensor, version) and not torch.equal(tensor, values):
                    tensor.copy_(values)

    @contextmanager
    def as_they_were(self, before: Saved) -> Iterator[None]:
        """Run with an old state, and restore the current one. Tensors that have changed are replaced, not written to: a
        graph may need their current values."""
        today = self.save()
        old = _old_tensors(before)
        for holder, kind, (keys, values) in before.held:
            _put(_Held(holder, kind, (keys, [old.get(id(value), value) for value in values] if old else values)))
        self.hooks.restore(before.hooks)
        try:
            yield
        finally:
            self.hooks.restore(today.hooks)
            for held in today.held:
                _put(held)

    def changed(self, before: Saved) -> list[torch.Tensor]:
        """Return the tensors that have changed since and have no copy."""
        return [t for t, version, values in before.tensors if values is None and _version(t) != version]


class _Found:
    """Holders and tensors found so far."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self.met: set[int] = set()
        self.held: list[_Held] = []
        self.tensors: list[_Copy] = []

    def module(self, module: nn.Module) -> None:
        """Add the attributes that were set on a module."""
        if self.copies.is_still(module):
            return
        look = look_module(module)
        self.held.append(_Held(module, MODULE, look))
        met = self.met
        for name, part in zip(*look, strict=True):
            if type(part) not in PLAIN and name not in OWN and id(part) not in met:
                self.reach(part, DEEP - 1)

    def reach(self, value: Any, deep: int) -> None:
        if type(value) in PLAIN or id(value) in self.met:
            return
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                self.met.add(id(value))
                self.tensors.append(self.copies.of(value))
            return
        if isinstance(value, (tuple, frozenset)):
            inner: Iterable[Any] = value
        else:
            kind = kind_of(value)
            if kind is None or self.copies.is_still(value) or isinstance(value, nn.Module):
                return  # the modules of the model are added separately
            self.met.add(id(value))
            look = kind.look(value)
            self.held.append(_Held(value, kind, look))
            inner = look[1]
        if deep:
            left = max(deep - (2 if is_record(value) else 1), 0)
            met = self.met
            for part in inner:
                if type(part) not in PLAIN and id(part) not in met:
                    self.reach(part, left)


def _put(held: _Held) -> None:
    holder, kind, look = held
    if not same(kind.look(holder), look):
        kind.put(holder, *look)


def _old_tensors(before: Saved) -> dict[int, torch.Tensor]:
    """Return copies with the old values, for tensors that have changed since."""
    found: dict[int, torch.Tensor] = {}
    for tensor, version, values in before.tensors:
        if _changed(tensor, version):
            if values is None and tensor.grad_fn is None:
                raise SplitError(
                    "a large tensor that a forward changes to have done so from the first step on, with recompute",
                    f"one of shape {tuple(tensor.shape)} that began later",
                    "use recompute='never', or change it outside of the forward",
                )
            if values is not None:
                found[id(tensor)] = values.clone()
    return found


def _is_torchs(module: nn.Module) -> bool:
    """Whether a module is one of torch's layers without hooks, whose only state is buffers."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module).__module__.startswith("torch.nn.modules") and not hooks


def _changed(tensor: torch.Tensor, version: int) -> bool:
    """Whether a tensor has been written to since a version, or may have been."""
    return _version(tensor) != version or _moves_unseen(tensor)


def _moves_unseen(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 1 and tensor.is_floating_point() and tensor.numel() * tensor.element_size() <= LARGE


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
