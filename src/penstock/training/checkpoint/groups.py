"""Settings of optimizers and LR schedulers by the parameters they are for.

Each stage has an optimizer of its own, whose groups depend on which parameters the stage owns; another layout has other
stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError
from penstock.training.checkpoint.plain_values import read, written

Names = dict[nn.Parameter, str]
Told = dict[str, Any]

# how an update is computed, not what it gives: this process's own affair
OWN = frozenset({"foreach", "fused", "capturable", "differentiable"})
# what an LR scheduler keeps for each group, as a list
BY_GROUP = frozenset({"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"})
INNER = "_schedulers"  # of one that is made of others


def told_groups(optimizer: torch.optim.Optimizer, scheduler: Any, names: Names) -> list[Told]:
    """Every group of one optimizer: whose it is, its settings, and what the LR scheduler keeps for it."""
    kept = None if scheduler is None else scheduler.state_dict()
    return [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            "settings": written(_settings(group), "a setting of the optimizer"),
            "scheduler": None if kept is None else written(_seen_by(at, kept), "the LR scheduler's state"),
        }
        for at, group in enumerate(optimizer.param_groups)
        if group["params"]
    ]


def fitting(optimizer: torch.optim.Optimizer, names: Names, groups: list[Told]) -> list[Told | None]:
    """For every group of an optimizer, the written one that its parameters were in; None for a group of none."""
    by_name = {name: group for group in groups for name in group["parameters"]}
    mine = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    unknown = sorted(name for group in mine for name in group if name not in by_name)
    if unknown:
        raise InputError(
            "a checkpoint with the optimizer's settings for every parameter that is trained",
            f"none for {', '.join(unknown)}",
            "train the parameters that were trained when it was written",
        )
    return [_only([by_name[name] for name in group], group) for group in mine]


def settings_of(optimizer: torch.optim.Optimizer, found: list[Told | None], same_torch: bool) -> list[Told]:
    """The groups' settings as they will be, in the form of an optimizer's state dict."""
    groups = []
    for group, told in zip(optimizer.state_dict()["param_groups"], found, strict=True):
        if told is not None:
            settings = read(told["settings"])
            _require_alike(_settings(group), settings, "the optimizer's", same_torch)
            group |= {key: value for key, value in settings.items() if key != "params"}
        groups.append(group)
    return groups


def scheduler_of(scheduler: Any, found: list[Told | None], same_torch: bool) -> Told:
    """An LR scheduler's state dict as it will be."""
    own = scheduler.state_dict()
    views = [_seen_by(at, own) if told is None else read(told["scheduler"]) for at, told in enumerate(found)]
    for at, view in enumerate(views):
        _require_alike(_seen_by(at, own), view, "the LR scheduler's", same_torch)
        hidden = sorted(key for key in view if key not in own and hasattr(scheduler, key))
        if hidden:
            raise ValueError(f"the LR scheduler's {hidden[0]!r}, which is none of its state")
    first = next(at for at, told in enumerate(found) if told is not None)
    return _joined(views, first)


def before(thing: Any) -> Callable[[], None]:
    """What gives an optimizer or an LR scheduler back what it holds now. Its tensors are not copied: a load replaces
    them, and the groups and inner schedulers keep their identity."""
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


def _require_alike(own: Any, told: Any, what: str, same_torch: bool) -> None:
    """Refuse a value that cannot stand where this process has its own: a word for a number, a list that is too short.

    What is None on one side may be anything on the other. Another version of torch may keep less than this one.
    """
    if own is None or told is None:
        return
    if isinstance(own, dict) and isinstance(told, dict):
        for key, value in own.items():
            if key in told:
                _require_alike(value, told[key], f"{what} {key!r}", same_torch)
            elif same_torch and not isinstance(own, Counter):
                raise ValueError(f"no {what} {key!r}")
    elif isinstance(own, (list, tuple)) and isinstance(told, (list, tuple)):
        if len(own) != len(told):
            raise ValueError(f"{what} of {len(told)} values for {len(own)}")
        for at, (one, other) in enumerate(zip(own, told, strict=True)):
            _require_alike(one, other, f"{what} {at}", same_torch)
    elif _kind(own) is not _kind(told) or told != told:
        raise ValueError(f"{what} as {str(told)[:40]!r}")


def _kind(value: Any) -> type:
    """Numbers are one kind, as Python's or as tensors."""
    number = isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)
    return float if number and (not isinstance(value, torch.Tensor) or value.numel() == 1) else type(value)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names") and key not in OWN}


def _only(told: list[Told], names: list[str]) -> Told | None:
    for other in told:
        if other["settings"] != told[0]["settings"] or other["scheduler"] != told[0]["scheduler"]:
            one, two = (
                next(n for n in names if n in told[0]["parameters"]),
                next(n for n in names if n in other["parameters"]),
            )
            raise InputError(
                "parameters of one group to have had the same settings when the checkpoint was written",
                f"different ones for {one} and {two}",
                "make the optimizer with the groups that it had then",
            )
    return told[0] if told else None


def _seen_by(group: int, state: Told) -> Told:
    """A scheduler's state with one group's value in place of each list of all groups'."""
    seen = dict(state)
    for key, value in state.items():
        if key in BY_GROUP and isinstance(value, (list, tuple)):
            seen[key] = value[group]
        elif key == INNER:
            seen[key] = [_seen_by(group, inner) for inner in value]
    return seen


def _joined(views: list[Told], first: int) -> Told:
    """The other way: what is no list of all groups' is the same for all that were written."""
    state = dict(views[first])
    for key, value in views[first].items():
        if key in BY_GROUP:
            state[key] = [view[key] for view in views]
        elif key == INNER:
            state[key] = [_joined([view[key][at] for view in views], first) for at in range(len(value))]
    return state
