"""Save and restore the hooks of modules.

A forward may register hooks when it first runs, as models of `transformers` do that collect hidden states.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

_KINDS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)

_FULL = "_is_full_backward_hook"  # the kind of backward hooks of a module: torch refuses to mix them

Table = dict[int, Any]


class SavedHooks(NamedTuple):
    """The hook tables of all modules (None for empty ones), and the kinds of their backward hooks."""

    tables: list[Table | None]
    full: list[bool | None]


class Hooks:
    """All hooks of some modules that run at their calls."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.attributes = [vars(module) for module in modules]
        self.tables: list[Table] = [held[kind] for held in self.attributes for kind in _KINDS]

    def save(self) -> SavedHooks:
        """Return the current hooks. This runs before every step, so it has to be fast."""
        return SavedHooks(
            [dict(table) if table else None for table in self.tables],
            [held[_FULL] for held in self.attributes],
        )

    def restore(self, before: SavedHooks) -> None:
        """Remove hooks that were added since, and restore those that were removed, in the old order."""
        for table, old in zip(self.tables, before.tables, strict=True):
            if list(table.items()) != list((old or {}).items()):
                table.clear()
                table.update(old or {})
        for held, full in zip(self.attributes, before.full, strict=True):
            held[_FULL] = full
