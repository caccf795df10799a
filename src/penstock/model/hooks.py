"""Hooks on a model, and the refusal of those that no cut allows."""

from __future__ import annotations

from torch import nn

from penstock.errors import SplitError
from penstock.model.path import Path
from penstock.model.walk import Layout

_EVERYWHERE = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def hooks_of(module: nn.Module) -> list[str]:
    """Return the names of the hooks on a module itself: on an open module, they would run on every stage."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [getattr(hook, "__qualname__", repr(hook)) for kind in kinds for hook in getattr(module, kind, {}).values()]


def refuse_open_hooks(layout: Layout, pieces: int) -> None:
    """Raise for hooks that would run on every stage."""
    for module in layout.open:
        found = hooks_of(module)
        if found:
            raise SplitError(
                "modules that a cut goes through to have no hooks of their own",
                f"{found[0]} on {layout.names[id(module)] or 'the model itself'}",
                "put the hook on a module inside one stage, or cut elsewhere",
            )
    for kind in _EVERYWHERE if pieces > 1 else ():
        for hook in getattr(nn.modules.module, kind).values():
            raise SplitError(
                "no hooks on all modules there are: those that a cut goes through would run them on every stage",
                getattr(hook, "__qualname__", repr(hook)),
                "put them on the modules that are meant",
            )


def refuse_parted_hooks(model: nn.Module, path: Path) -> None:
    """Raise for a hook on a tied parameter, whose gradient is computed in parts by several stages: the hook would get
    parts."""
    every = dict(model.named_parameters(remove_duplicate=False))
    for name, events in path.trace.parameters().items():
        kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
        hooks = [hook for kind in kinds for hook in (getattr(every[name], kind, None) or {}).values()]
        if hooks and len({path.stage_of(at) for at in events}) > 1:
            raise SplitError(
                "no hook on a parameter that several stages use",
                f"{getattr(hooks[0], '__qualname__', repr(hooks[0]))} on {name!r}",
                "cut where one stage has all its uses, or take the hook away",
            )


def refuse_compiled(model: nn.Module) -> None:
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise SplitError(
            "a model whose own code can be run in parts",
            f"{type(getattr(model, '_orig_mod', model)).__name__} compiled as a whole",
            "compile its blocks instead: model.block = torch.compile(model.block)",
        )
