"""Run a model's own forward and observe every event in it.

Where a model is cut between two of its submodules, the code around them, which is the forwards of the modules that
contain the cut, is run by every stage. Those modules are *open*. What open code does is a sequence of *events*: a call
of a submodule that is not open (an *atom*, run or skipped as a whole), or a torch function between atoms (*glue*). A
trace records the events of one forward; a replay runs those of one stage and skips the others. Both are walks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from penstock.model import tree
from penstock.model.encoder import is_encoder, padded
from penstock.model.holders import COMPILED
from penstock.model.trace import hollow, standing_for

_CALL = nn.Module.__call__
_APPLY = vars(torch.autograd.Function)["apply"]  # the unbound classmethod
transform_level = torch._C._functorch.maybe_current_level  # None outside
_LIBRARIES = ("torch", "penstock", "contextlib", "functools", "random", "copy")


class Layout:
    """The facts about a model that every walk needs, computed once, as walks run for each micro-batch and stage."""

    def __init__(self, model: nn.Module, opened: frozenset[str]) -> None:
        self.model = model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.modules = tuple(model.modules())
        self.open = tuple(module for name, module in model.named_modules() if name in opened)
        self.opened = frozenset(map(id, self.open))
        self.entries = Entries()  # of the modules that open code calls
        if any(map(is_encoder, self.open)):
            self.entries.learn(None)
        self.parameters: dict[int, str] = {}  # id() -> name; tied parameters have their first name
        self.read_parameters()

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter of the model, even one assigned since."""
        if not isinstance(tensor, nn.Parameter):
            return False
        if id(tensor) not in self.parameters:
            self.read_parameters()
        return id(tensor) in self.parameters

    def hollow(self, value: Any) -> Any:
        """Return a result with empty tensors, and with names in place of parameters."""
        return tree.replace(
            value, lambda t: standing_for(self.parameters[id(t)], t) if self.is_parameter(t) else hollow(t)
        )

    def read_parameters(self) -> None:
        """Read the current parameters of the model."""
        self.parameters = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self.parameters.setdefault(id(parameter), name)


class Walk(TorchFunctionMode):
    """An observed forward. Subclasses define what an atom call and a torch function do."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.inside = False  # whether an event is running, whose own calls are not observed

    def met(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an atom call."""
        return self.hidden(self.atom, name, partial(_CALL, module), args, kwargs)

    def atom(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def glue(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def transformed(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """Handle a call inside a transform of torch.func (such as vmap): it runs on every stage, as its tensors cannot
        be sent."""

    def made_inside(self, result: Any) -> Any:
        """Return the result of a custom Function inside an event."""
        return result

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward under this walk. Containers in its inputs are copied, so that changes to them do not
        affect the next walk."""
        args, kwargs = tree.fresh((args, kwargs))
        with self.watched():
            _running.walk, before = self, _running.walk
            try:
                with self:
                    return self.layout.model(*args, **kwargs)
            finally:
                _running.walk = before

    def watched(self) -> AbstractContextManager[None]:
        """In which calls come to the walk."""
        return watching()

    def native(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call without observing it."""
        self.inside = True
        try:
            return call(*args, **kwargs)
        finally:
            self.inside = False

    def hidden(self, meet: Callable[..., Any], *arguments: Any) -> Any:
        """Run an event with the mode off, as torch does for functions, so that an atom runs at full speed."""
        mine = torch.overrides._get_current_function_mode() is self  # type: ignore[no-untyped-call]
        if mine:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            return meet(*arguments)
        finally:
            if mine:
                super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.inside:
            return func(*args, **(kwargs or {}))
        if transform_level() is not None:
            self.transformed(function_name(func), args, kwargs or {})
            return func(*args, **(kwargs or {}))
        return self.glue(function_name(func), func, args, kwargs or {})


class _Running(threading.local):
    """The walk of each thread: calls on other threads are not part of it."""

    def __init__(self) -> None:
        self.walk: Walk | None = None


_running = _Running()
_lock = threading.Lock()
_watchers = 0  # in all threads


class watching:
    """A context in which calls of modules and of autograd Functions go to the running walk first. It may be nested.

    Every walk of a module's own code enters it or `Entries`; code that runs many of them enters it once around all.
    """

    depth = 0  # nesting depth over all threads

    def __enter__(self) -> None:
        with _lock:
            if not watching.depth:
                nn.Module.__call__ = _call  # type: ignore[method-assign]
            watching.depth += 1
            _meet_functions(1)

    def __exit__(self, *_: object) -> None:
        with _lock:
            watching.depth -= 1
            if not watching.depth:
                nn.Module.__call__ = _CALL  # type: ignore[method-assign]
            _meet_functions(-1)


class Entries:
    """The same, for the modules that a model's open code is known to call.

    Changing a class that all modules inherit from makes Python forget what it has looked up in each of them, and what
    is called inside an atom need not come here. So each module that is called gets an entry of its own, where torch
    keeps a compiled call. Modules that are not the model's own have none: where open code calls such, all are watched.
    """

    active: ClassVar[dict[int, list[Any]]] = {}  # in all threads: a module, how often it was entered, what it had

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.all: watching | None = None
        self.depth = 0

    def learn(self, modules: Iterable[nn.Module] | None) -> None:
        """Take in modules that open code calls, now if need be; None for some that are not the model's."""
        with _lock:
            for module in modules or ():
                if id(module) not in self.modules:
                    self.modules[id(module)] = module
                    for _ in range(self.depth):
                        self._enter(module)
        if modules is None and self.all is None:
            self.all = watching()
            for _ in range(self.depth):
                self.all.__enter__()

    def __enter__(self) -> None:
        if self.all is not None:
            self.all.__enter__()
        with _lock:
            self.depth += 1
            _meet_functions(1)
            if self.depth == 1:
                for module in self.modules.values():
                    self._enter(module)

    def __exit__(self, *_: object) -> None:
        with _lock:
            self.depth -= 1
            _meet_functions(-1)
            if not self.depth:
                for module in self.modules.values():
                    self._leave(module)
        if self.all is not None:
            self.all.__exit__()

    def _enter(self, module: nn.Module) -> None:
        entry, attributes = self.active.get(id(module)), vars(module)
        if entry is None:
            own = attributes.get(COMPILED)
            self.active[id(module)] = [module, 1, own]
            attributes[COMPILED] = partial(_entered, module, own)
        else:
            entry[1] += 1

    def _leave(self, module: nn.Module) -> None:
        entry = self.active[id(module)]
        entry[1] -= 1
        if not entry[1]:
            del self.active[id(module)]
            if entry[2] is None:
                vars(module).pop(COMPILED, None)
            else:
                vars(module)[COMPILED] = entry[2]


def _meet_functions(change: int) -> None:
    """Calls of autograd Functions are met while anybody watches."""
    global _watchers
    _watchers += change
    if _watchers == max(change, 0):
        torch.autograd.Function.apply = classmethod(_apply) if change > 0 else _APPLY  # type: ignore[method-assign]


def is_walking() -> bool:
    """Whether this thread is in a walk's forward."""
    return _running.walk is not None


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    walk = _running.walk
    if walk is None or walk.inside:  # as torch's own `__call__`, which is the usual case
        own = module._compiled_call_impl
        return module._call_impl(*args, **kwargs) if own is None else own(*args, **kwargs)  # type: ignore[no-untyped-call]
    return _come(walk, module, _CALL, args, kwargs)


def _entered(module: nn.Module, own: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    walk = _running.walk
    if walk is None or walk.inside:
        return module._call_impl(*args, **kwargs) if own is None else own(*args, **kwargs)  # type: ignore[no-untyped-call]
    run = type(module)._call_impl if own is None else lambda _, *args, **kwargs: own(*args, **kwargs)
    return _come(walk, module, run, args, kwargs)


def _come(walk: Walk, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of a module comes to a walk; `run` is the call itself."""
    if transform_level() is not None:
        walk.transformed(type(module).__name__, (args, list(module.parameters())), kwargs)
        return run(module, *args, **kwargs)
    if id(module) in walk.layout.opened:
        return padded(run, module, *args, **kwargs) if is_encoder(module) else run(module, *args, **kwargs)
    name = walk.layout.names.get(id(module), f"({type(module).__name__})")
    return walk.met(name, module, args, kwargs)


def _apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    walk, run = _running.walk, _APPLY.__func__
    if walk is None:
        return run(cls, *args, **kwargs)
    if walk.inside:
        return walk.made_inside(run(cls, *args, **kwargs))
    if transform_level() is not None:
        walk.transformed(cls.__name__, args, kwargs)
        return run(cls, *args, **kwargs)
    return walk.hidden(walk.glue, f"{cls.__module__}.{cls.__qualname__}.apply", partial(run, cls), args, kwargs)


_names: dict[Any, str] = {}


def function_name(func: Callable[..., Any]) -> str:
    """Return the name of a torch function."""
    name = _names.get(func)
    if name is None:
        name = _names[func] = resolve_name(func) or getattr(func, "__qualname__", repr(func))
    return name


def users_line(frame: FrameType | None = None) -> str:
    """Return file and line of the innermost frame outside of libraries, from `frame` or the caller's on."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in _LIBRARIES:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"
