"""Run a model without side effects: buffers, attributes and random states are restored.

A trace and a check run the user's forward more often than the user asked for. Statistics, counters and random draws
must not change.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.errors import SplitError
from penstock.model import tree
from penstock.model.holders import OWN
from penstock.model.state import State
from penstock.model.walk import Walk, is_walking, users_line
from penstock.model.written import put_back


class untouched:
    """A context that restores buffers, attributes, their contents, and random states. `more` are generators that the
    forward uses and no module holds; `written`, the names of weights that it changes."""

    def __init__(self, model: nn.Module, more: Iterable[torch.Generator] = (), written: Iterable[str] = ()) -> None:
        self.state = State(model.modules(), more=more)
        self.written = [model.get_parameter(name) for name in written]

    def __enter__(self) -> None:
        self.before = self.state.save()
        self.weights = [(weight, weight.data, weight.detach().clone()) for weight in self.written]
        self.chance = _chance()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def __exit__(self, *_: object) -> None:
        self.state.restore(self.before)
        put_back(self.weights)
        state, numpy_state, torch_state = self.chance
        random.setstate(state)
        np.random.set_state(numpy_state)
        torch.random.set_rng_state(torch_state)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def copied(value: Any) -> Any:
    """Return copies of the inputs, which a forward may then change in place."""
    return tree.replace(value, lambda t: t.detach().clone().requires_grad_(t.requires_grad))


def _chance() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state()


class no_side_effects:
    """A context that refuses open code which sets attributes of the model's modules.

    Open code runs once on every stage, so that counters would be wrong. An atom may set attributes, as long as no other
    event reads them; `read` is called with the event that set one. `now` returns the running event. One thread at a
    time, as methods of all modules are replaced meanwhile.
    """

    one_at_a_time = threading.RLock()

    def __init__(self, walk: Walk, now: Callable[[], int], read: Callable[[int], None]) -> None:
        self.walk, self.now, self.read = walk, now, read
        self.kept_inside: dict[tuple[int, str], int] = {}  # (module, attribute) -> the event that set it

    def __enter__(self) -> None:
        self.held = [_contents(module) for module in self.walk.layout.open]
        self.one_at_a_time.acquire()
        self.setattr = nn.Module.__setattr__
        walk, keep = self.walk, self.setattr

        def kept(module: nn.Module, name: str, value: Any) -> None:
            if is_walking() and id(module) in walk.layout.names and not _same(getattr(module, name, None), value):
                if not walk.inside:
                    _refuse_state(f"{_named(walk, module)}.{name} set at {users_line()}")
                self._watch_reads()
                self.kept_inside[id(module), name] = self.now()
            keep(module, name, value)

        nn.Module.__setattr__ = kept  # type: ignore[assignment,method-assign]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._leave(kind)
        finally:
            self.one_at_a_time.release()

    def _leave(self, kind: type[BaseException] | None) -> None:
        nn.Module.__setattr__ = self.setattr  # type: ignore[method-assign]
        if self.kept_inside:
            del nn.Module.__getattribute__
        if kind is not None:
            return
        for module, before in zip(self.walk.layout.open, self.held, strict=True):
            for name, contents in _contents(module).items():
                if before.get(name) != contents:
                    _refuse_state(f"{_named(self.walk, module)}.{name} changed by forward")

    def _watch_reads(self) -> None:
        """Observe reads of attributes once an atom has set one: few models do, and it slows down every attribute
        access."""
        if self.kept_inside:
            return

        def looked(module: nn.Module, name: str) -> Any:
            made = self.kept_inside.get((id(module), name))
            if made is not None and is_walking() and (made != self.now() or not self.walk.inside):
                self.read(made)
            return object.__getattribute__(module, name)

        nn.Module.__getattribute__ = looked  # type: ignore[method-assign,assignment]


def _refuse_state(where: str) -> None:
    raise SplitError(
        "no state kept on a module that a cut goes through: its code runs on every stage",
        where,
        "keep it inside one block, or return it and pass it on",
    )


def _same(old: Any, new: Any) -> bool:
    plain = (bool, int, float, str, type(None))
    return old is new or (type(old) is type(new) and isinstance(new, plain) and bool(old == new))


def _contents(module: nn.Module) -> dict[str, list[int]]:
    """Return the ids of the items in a module's own lists, sets and dicts, without hooks and the like."""
    return {
        name: [id(item) for item in (held.values() if isinstance(held, dict) else held)]
        for name, held in vars(module).items()
        if isinstance(held, (list, set, dict)) and (name == "_buffers" or name not in OWN)
    }


def _named(walk: Walk, module: nn.Module) -> str:
    return walk.layout.names[id(module)] or type(module).__name__
