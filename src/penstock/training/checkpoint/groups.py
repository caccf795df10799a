"""Settings of optimizers and LR schedulers, by the parameters they are for.

Each stage has its own optimizer, whose groups depend on the parameters that the stage owns; another layout has other
stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError
from penstock.training.checkpoint.plain_values import read, written

Names = dict[nn.Parameter, str]
Facts = dict[str, Any]  # of a group, or of an LR scheduler, as the checkpoint has them

# they decide how an update is computed, not its result: each process has its own
OWN = frozenset({"foreach", "fused", "capturable", "differentiable"})
# entries of an LR scheduler's state that are lists by group
BY_GROUP = frozenset({"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"})
INNER = "_schedulers"  # entry of a scheduler that consists of others


def group_facts(optimizer: torch.optim.Optimizer, scheduler: Any, names: Names) -> list[Facts]:
    """Return every group of one optimizer: its parameters, its settings, and its LR scheduler's state."""
    kept = None if scheduler is None else scheduler.state_dict()
    return [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            "settings": written(_settings(group), "a setting of the optimizer"),
            "scheduler": None if kept is None else written(_of_group(at, kept), "the LR scheduler's state"),
        }
        for at, group in enumerate(optimizer.param_groups)
        if group["params"]
    ]


def fitting(optimizer: torch.optim.Optimizer, names: Names, groups: list[Facts]) -> list[Facts | None]:
    """Return, for every group of an optimizer, the saved group of its parameters; None for an empty group."""
    by_name = {name: group for group in groups for name in group["parameters"]}
    grouped = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    unknown = sorted(name for group in grouped for name in group if name not in by_name)
    if unknown:
        raise InputError(
            "a checkpoint with the optimizer's settings for every parameter that is trained",
            f"none for {', '.join(unknown)}",
            "train the parameters that were trained when it was written",
        )
    return [_only([by_name[name] for name in group], group) for group in grouped]


def settings_of(optimizer: torch.optim.Optimizer, saved: list[Facts | None], same_torch: bool) -> list[Facts]:
    """Return the groups' settings to load, in the form of an optimizer's state dict."""
    groups = []
    for group, facts in zip(optimizer.state_dict()["param_groups"], saved, strict=True):
        if facts is not None:
            settings = read(facts["settings"])
            _require_alike(_settings(group), settings, "the optimizer's", same_torch)
            group |= {key: value for key, value in settings.items() if key != "params"}
        groups.append(group)
    return groups


def scheduler_of(scheduler: Any, saved: list[Facts | None], same_torch: bool) -> Facts:
    """Return the state dict that an LR scheduler will load."""
    own = scheduler.state_dict()
    views = [_of_group(at, own) if facts is None else read(facts["scheduler"]) for at, facts in enumerate(saved)]
    for at, view in enumerate(views):
        _require_alike(_of_group(at, own), view, "the LR scheduler's", same_torch)
        hidden = sorted(key for key in view if key not in own and hasattr(scheduler, key))
        if hidden:
            raise ValueError(f"the LR scheduler's {hidden[0]!r}, which is none of its state")
    first = next(at for at, facts in enumerate(saved) if facts is not None)
    return _joined(views, first)


def before(thing: Any) -> Callable[[], None]:
    """Return a function that restores the present state of an optimizer or an LR scheduler.

    Tensors are not copied, as a load replaces them; groups and inner schedulers keep their identity.
    """
    held = dict(vars(thing))
    groups = [(group, dict(group)) for group in held.get("param_groups", [])]
    lists = {key: list(value) for key, value in held.items() if isinstance(value, list)}
    inner = [before(one) for one in held.get(INNER, [])]

    def restore() -> None:
        vars(thing).clear()
        vars(thing).update(held)
        for key, values in lists.items():
            held[key][:] = values
        for group, settings in groups:
            group.clear()
            group.update(settings)
        for one in inner:
            one()

    return restore


def _require_alike(own: Any, saved: Any, what: str, same_torch: bool) -> None:
    """Raise for a saved value that cannot replace this process's own: a text for a number, a list that is too short.

    None on one side may be anything on the other. Another version of torch may keep less than this one.
    """
    if own is None or saved is None:
        return
    if isinstance(own, dict) and isinstance(saved, dict):
        for key, value in own.items():
            if key in saved:
                _require_alike(value, saved[key], f"{what} {key!r}", same_torch)
            elif same_torch and not isinstance(own, Counter):
                raise ValueError(f"no {what} {key!r}")
    elif isinstance(own, (list, tuple)) and isinstance(saved, (list, tuple)):
        if len(own) != len(saved):
            raise ValueError(f"{what} of {len(saved)} values for {len(own)}")
        for at, (one, other) in enumerate(zip(own, saved, strict=True)):
            _require_alike(one, other, f"{what} {at}", same_torch)
    elif _kind(own) is not _kind(saved) or saved != saved:
        raise ValueError(f"{what} as {str(saved)[:40]!r}")


def _kind(value: Any) -> type:
    """Return the type of a value; all numbers, Python's or tensors of one, have the same."""
    number = isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)
    return float if number and (not isinstance(value, torch.Tensor) or value.numel() == 1) else type(value)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names") and key not in OWN}


def _only(groups: list[Facts], names: list[str]) -> Facts | None:
    for other in groups:
        if other["settings"] != groups[0]["settings"] or other["scheduler"] != groups[0]["scheduler"]:
            one, two = (
                next(n for n in names if n in groups[0]["parameters"]),
                next(n for n in names if n in other["parameters"]),
            )
            raise InputError(
                "parameters of one group to have had the same settings when the checkpoint was written",
                f"different ones for {one} and {two}",
                "make the optimizer with the groups that it had then",
            )
    return groups[0] if groups else None


def _of_group(group: int, state: Facts) -> Facts:
    """Return a scheduler's state with one group's value in place of each list by group."""
    view = dict(state)
    for key, value in state.items():
        if key in BY_GROUP and isinstance(value, (list, tuple)):
            view[key] = value[group]
        elif key == INNER:
            view[key] = [_of_group(group, inner) for inner in value]
    return view


def _joined(views: list[Facts], first: int) -> Facts:
    """Return the state of all groups from one view for each; entries that are not lists by group are equal."""
    state = dict(views[first])
    for key, value in views[first].items():
        if key in BY_GROUP:
            state[key] = [view[key] for view in views]
        elif key == INNER:
            state[key] = [_joined([view[key][at] for view in views], first) for at in range(len(value))]
    return state
