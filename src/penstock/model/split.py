"""A model as stages: its own submodules, cut at some of their calls.

What one forward does may depend on its inputs' structure (an optional mask, an int, train or eval), so there is one
*path* for each kind of input, traced when it first comes. Cuts are the same modules on every path.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.errors import SplitError
from penstock.model import tree
from penstock.model.allowed import refusal
from penstock.model.chain import Chain
from penstock.model.cuts import balanced, hooks_of, open_enough, open_for, starts_of
from penstock.model.flags import flags_of
from penstock.model.record import trace
from penstock.model.replay import Done, Passage, PathChangedError, Replay
from penstock.model.state import State
from penstock.model.trace import Trace
from penstock.model.walk import Layout

MANY = 4096  # sizes of inputs to remember


class Outlook(NamedTuple):
    """What of a model decides its path: modes, flags, and numbers, which rarely do."""

    modes: tuple[bool, ...]
    flags: tuple[Any, ...]
    numbers: tuple[Any, ...]


class Kind(NamedTuple):
    """What decides the path before anything runs, and numbers, which may."""

    marks: Any  # modes, flags, and the structure of the inputs
    sizes: tuple[Any, ...]  # shapes and numbers in the inputs
    numbers: tuple[Any, ...]  # attributes of open modules


@dataclass(frozen=True)
class Path:
    """One way through the model: its trace, where stages begin in it, and what crosses."""

    trace: Trace
    starts: tuple[int, ...]
    incoming: tuple[dict[int, int], ...]  # by stage: value -> the stage that makes it
    outgoing: tuple[frozenset[int], ...]
    changed: tuple[frozenset[int], ...]  # by stage: incoming values that it changes in place
    sizes: dict[Any, Passage] = field(default_factory=dict)  # of inputs known to take it, and what was then told
    states: dict[int, State] = field(default_factory=dict)  # of the modules that each stage runs
    calls: dict[int, bool] = field(default_factory=dict)  # which stages are one call and nothing else
    numbers: set[Any] = field(default_factory=set)  # on open modules, with which inputs are known to take it

    def span(self, stage: int) -> tuple[int, int]:
        ends = (*self.starts[1:], len(self.trace.events))
        return self.starts[stage], ends[stage]

    def is_one_call(self, stage: int) -> bool:
        """Whether a stage is one call and nothing else, from one tensor to one tensor."""
        known = self.calls.get(stage)
        if known is None:
            known = self.calls[stage] = self._looks_like_one_call(stage)
        return known

    def _looks_like_one_call(self, stage: int) -> bool:
        first, last = self.span(stage)
        if (first, last) != (stage, stage + 1) or self.changed[stage] or self.trace.inputs:
            return False
        event = self.trace.events[first]
        given = tuple(self.incoming[stage]) == (self.trace.events[stage - 1].makes if stage else ())
        given = given and all(type(result) is torch.Tensor for result in self.trace.results[max(stage - 1, 0) : last])
        plain = event.atom and not event.changes and not event.talks and not event.buffers and event.region is None
        alone = not self.trace.sides and not self.trace.withheld and not self.trace.buffers
        ends = stage < len(self.starts) - 1 or self.trace.returned == event.makes
        return given and plain and alone and ends and len(event.makes) == 1

    def noted(self, kind: Kind, told: Passage) -> Path:
        if max(len(self.sizes), len(self.numbers)) >= MANY:
            self.sizes.clear()
            self.numbers.clear()
        self.sizes.setdefault(kind.sizes, told)
        self.numbers.add(kind.numbers)
        return self

    def stage_of(self, event: int) -> int:
        return bisect_right(self.starts, event) - 1

    @cached_property
    def routes(self) -> tuple[dict[int, tuple[int, ...]], ...]:
        """By the stage that makes them: values by the stage that reads them."""
        found: tuple[dict[int, tuple[int, ...]], ...] = tuple({} for _ in self.incoming)
        for stage, values in enumerate(self.incoming):
            for value, source in values.items():
                found[source][stage] = (*found[source].get(stage, ()), value)
        return found

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted((source, stage) for source, readers in enumerate(self.routes) for stage in readers))


class Split:
    """The stages of one model, found from an example of its inputs."""

    def __init__(
        self,
        model: nn.Module,
        pieces: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cuts: list[str] | None = None,
        seen: Trace | None = None,  # of the example, by somebody who opened the same modules
    ) -> None:
        _refuse_compiled(model)
        self.model, self.pieces = model, pieces
        self.cuts: list[tuple[str, int]] = []
        # Around a trace, which runs the whole model, and gives the inputs to run it with: weights that wait elsewhere
        # come home for it, or where they are nowhere, the inputs are hollow.
        self.tracing: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        self.whole = True  # all weights are at hand
        if pieces == 1:
            self.layout = Layout(model, frozenset())  # nothing to cut: the model itself is the one atom
            seen = trace(self.layout, args, kwargs)
        elif cuts is None:
            self.layout, seen = open_enough(model, pieces, args, kwargs)
            self._refuse_hooks()
            self.cuts = balanced(model, seen, pieces)
        else:
            self.layout = Layout(model, open_for(model, cuts))
            self._refuse_hooks()
            self.cuts = [(name, 0) for name in map(self._called, cuts)]
            seen = seen or trace(self.layout, args, kwargs)
        self.paths: dict[Any, list[Path]] = {}
        seen = self._settled(seen, args, kwargs)
        self.first = self._learn(seen, self._kind(args, kwargs, self.outlook()))  # the example's path
        self.owner = self._owners(self.first)
        chain = {(stage, stage + 1) for stage in range(pieces - 1)}
        # stages that exchange data on the example's path, and neighbours in any case
        self.edges = tuple(sorted(chain | set(self.first.edges)))

    def outlook(self) -> Outlook:
        """What the model itself says of its path, whatever the inputs; a model that has got hooks is refused."""
        self._refuse_hooks()
        modes = (torch.is_grad_enabled(), *[module.training for module in self.layout.modules])
        return Outlook(modes, *flags_of(self.layout.open))

    def path(self, args: tuple[Any, ...], kwargs: dict[str, Any], outlook: Outlook | None = None) -> Path:
        """The path that these inputs take. An outlook serves for inputs between which nobody changes the model."""
        kind = self._kind(args, kwargs, outlook or self.outlook())
        for path in self.paths.get(kind.marks, ()):
            if self._takes(path, kind, args, kwargs):
                return path.noted(kind, Passage())
        likely = None if self.whole else self._likely(kind, args, kwargs)
        if likely is not None:
            return likely.noted(kind, Passage())
        with self.tracing((args, kwargs)) as (args, kwargs):
            seen = self._settled(trace(self.layout, args, kwargs), args, kwargs)
        return self._learn(seen, kind)

    def _settled(self, seen: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        """A trace that the next forward will follow: where caches of the user's were cold, a second one."""
        walk = self._walked(seen, Passage.of(seen), len(seen.events), args, kwargs)
        return seen if walk is not None and walk.at == len(seen.events) else trace(self.layout, args, kwargs)

    def forget(self, path: Path) -> None:
        """Inputs of its kind will be traced again, if they can be."""
        if self.whole:
            for known in self.paths.values():
                known[:] = [one for one in known if one is not path]

    def _likely(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path | None:
        """The path of inputs of a known kind and of new sizes, where no trace can tell. If open code decides otherwise
        when it sees the true shapes, which stages tell each other, the replay finds out and says so."""
        known = [path for path in self.paths.get(kind.marks, ()) if self._answers_alike(path.trace, args, kwargs)]
        return known[0] if len(known) == 1 else None

    def _answers_alike(self, seen: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether open code that looks at these inputs' data finds what it found on the trace."""
        if not seen.answers:
            return True
        walk = self._walked(seen, Passage(), seen.decided, args, kwargs)
        return walk is not None and tuple(walk.answers) == seen.answers

    def _learn(self, seen: Trace, kind: Kind) -> Path:
        known = self.paths.setdefault(kind.marks, [])
        signature = seen.signature()
        for path in known:
            if path.trace.signature() == signature:
                return path.noted(kind, Passage.of(seen))
        fresh = self._path(seen)
        self._refuse_parted_hooks(fresh)
        known.append(fresh)
        return fresh.noted(kind, Passage.of(seen))

    def _takes(self, path: Path, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these inputs take a path, as far as can be told without running the model.

        The code is the same: shapes, and answers about data, decide. What shapes the model makes of new sizes is not
        known; where open code looks at them, only a trace can tell.
        """
        seen, told = path.trace, path.sizes.get(kind.sizes)
        if told is None and seen.asks:
            return False
        sure = told is not None and _ANY not in kind.sizes and kind.numbers in path.numbers
        if sure and not seen.answers:
            return True
        if told is not None and sure:
            walk = self._walked(seen, told, seen.decided, args, kwargs)
            if walk is not None and tuple(walk.answers) == seen.answers:
                return True
        walk = self._walked(seen, told or Passage(), len(seen.events), args, kwargs)
        return walk is not None and walk.at == len(seen.events)

    def _walked(
        self, seen: Trace, told: Passage, stop: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Replay | None:
        """A walk of so many events, all of them skipped, or None if the inputs took another path."""
        end = len(seen.events)
        walk = Replay(self.layout, seen, (end, end), {}, frozenset(), told, stop=stop)
        inputs = walk.meet_inputs((args, kwargs))
        try:
            walk.forward(*inputs)
        except Done:
            return walk
        except Exception:  # whatever the user's code says of stand-ins; a trace will tell what is true
            return None
        return walk

    def run(
        self,
        path: Path,
        stage: int,
        received: dict[int, torch.Tensor],
        passage: Passage,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> tuple[dict[int, torch.Tensor], Any]:
        """One stage's part of a forward: the values later stages need, and on the last stage the model's result."""
        if not self.walks(path, stage):
            return self._called_alone(path, stage, received, passage, args, kwargs, around)
        replay = Replay(self.layout, path.trace, path.span(stage), received, path.outgoing[stage], passage, around)
        try:
            result = replay.run(args, kwargs)
        except PathChangedError:
            self.forget(path)
            raise
        return replay.made, result

    def walks(self, path: Path, stage: int) -> bool:
        """Whether a stage runs code of the model's around its own modules, which a walk has to observe."""
        return not (path.is_one_call(stage) and isinstance(self.model, Chain))

    def _called_alone(
        self,
        path: Path,
        stage: int,
        received: dict[int, torch.Tensor],
        passage: Passage,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: Callable[[], AbstractContextManager[Any]],
    ) -> tuple[dict[int, torch.Tensor], Any]:
        """A stage module that the user made, from one tensor to one tensor: no code around it has to run."""
        (made,) = path.trace.events[stage].makes
        assert isinstance(self.model, Chain)
        module = self.model.stages[stage]
        with around():
            result = module(*received.values()) if stage else module(*args, **kwargs)
        if type(result) is not torch.Tensor:
            self.forget(path)
            raise PathChangedError(f"a {type(result).__name__} of stage {stage}, where its trace gave a tensor")
        if path.trace.values[made].asked:
            passage.shapes[made] = (tuple(result.shape), result.dtype)
        wanted = made in path.outgoing[stage]
        return {made: result} if wanted else {}, None if wanted else result

    def parameters(self, stage: int) -> dict[str, nn.Parameter]:
        """The parameters a stage owns, by the model's own names; a tied one belongs to the first stage that uses it."""
        named = dict(self.model.named_parameters())
        return {name: parameter for name, parameter in named.items() if self.owner[name] == stage}

    def uses(self, stage: int) -> set[str]:
        """Names of the parameters that a stage needs: those its forward uses, tied ones too, and those it owns."""
        used = self.first.trace.parameters().items()
        named = {name for name, events in used if any(self.first.stage_of(at) == stage for at in events)}
        return named | {name for name, owner in self.owner.items() if owner == stage}

    def used(self, stage: int) -> list[nn.Parameter]:
        """The same as parameters, each once."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        return list({id(named[name]): named[name] for name in sorted(self.uses(stage))}.values())

    def buffer_stages(self) -> dict[str, int]:
        """The stage of every buffer that lies inside some atom, by name. Others are the same on every stage."""
        found: dict[int, int] = {}
        for at, event in enumerate(self.first.trace.events):
            if event.atom:
                for buffer in self._submodule(event.name).buffers():
                    found.setdefault(id(buffer), self.first.stage_of(at))
        named = self.model.named_buffers(remove_duplicate=False)
        return {name: found[id(buffer)] for name, buffer in named if id(buffer) in found}

    def ties(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several stages use: those stages, the owner's first."""
        canonical = {id(parameter): name for name, parameter in self.model.named_parameters()}
        every = dict(self.model.named_parameters(remove_duplicate=False))
        users: dict[str, set[int]] = {}
        for name, events in self.first.trace.parameters().items():
            users.setdefault(canonical[id(every[name])], set()).update(map(self.first.stage_of, events))
        return {name: tuple(sorted(stages)) for name, stages in users.items() if len(stages) > 1}

    def modules(self, path: Path, stage: int) -> list[nn.Module]:
        """Those a stage runs on a path: what its atoms are made of, and the open ones around them."""
        first, last = path.span(stage)
        names = {event.name for event in path.trace.events[first:last] if event.atom}
        return [*self.layout.open, *(m for name in sorted(names) for m in self._submodule(name).modules())]

    def kept_by_others(self, path: Path, stage: int) -> dict[tuple[int, str], str]:
        """Attributes that the forwards of other stages set, by module and name, and what to call them."""
        return {
            (id(self._submodule(module)), name): f"{module}.{name}"
            for (module, name), at in path.trace.kept.items()
            if path.stage_of(at) != stage
        }

    def _submodule(self, name: str) -> nn.Module:
        try:
            return self.model.get_submodule(name)
        except AttributeError:
            return nn.Identity()  # called though it is no part of the model

    def _path(self, seen: Trace) -> Path:
        starts = starts_of(seen, self.cuts)
        for reason in filter(None, (refusal(seen, cut) for cut in starts[1:])):
            raise reason

        def stage_of(event: int) -> int:
            return bisect_right(starts, event) - 1

        incoming: tuple[dict[int, int], ...] = tuple({} for _ in range(self.pieces))
        outgoing: list[set[int]] = [set() for _ in range(self.pieces)]
        changed: list[set[int]] = [set() for _ in range(self.pieces)]
        for number, value in enumerate(seen.values):
            if value.made_by < 0 or value.free:
                continue
            source = stage_of(value.made_by)
            for reader in {stage_of(event) for event in value.read_by} - {source}:
                incoming[reader][number] = source
                outgoing[source].add(number)
        for at, event in enumerate(seen.events):
            for before, _ in event.changes:
                if before in incoming[stage_of(at)]:
                    changed[stage_of(at)].add(before)
        return Path(seen, starts, incoming, tuple(map(frozenset, outgoing)), tuple(map(frozenset, changed)))

    def _owners(self, path: Path) -> dict[str, int]:
        """The stage of every parameter of the model: none is ever lost."""
        canonical = {id(parameter): name for name, parameter in self.model.named_parameters()}
        used: dict[str, int] = {}
        every = dict(self.model.named_parameters(remove_duplicate=False))
        for name, events in path.trace.parameters().items():
            stage = path.stage_of(min(events))
            key = canonical[id(every[name])]
            used[key] = min(used.get(key, stage), stage)
        owner, last = {}, 0
        for name, _ in self.model.named_parameters():
            last = used.get(name, last)  # one that the forward does not use stays with its neighbours
            owner[name] = last
        return owner

    def _called(self, name: str) -> str:
        """The name under which walks know a module that has several."""
        return str(self.layout.names[id(self.model.get_submodule(name))])

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any], outlook: Outlook) -> Kind:
        sizes: list[Any] = []
        marks = (outlook.modes, outlook.flags, _mark((args, kwargs), sizes))
        return Kind(marks, tuple(sizes), outlook.numbers)

    def _refuse_hooks(self) -> None:
        for module in self.layout.open:
            found = hooks_of(module)
            if found:
                raise SplitError(
                    "modules that a cut goes through to have no hooks of their own",
                    f"{found[0]} on {self.layout.names[id(module)] or 'the model itself'}",
                    "put the hook on a module inside one stage, or cut elsewhere",
                )
        for kind in _EVERYWHERE if self.pieces > 1 else ():
            for hook in getattr(nn.modules.module, kind).values():
                raise SplitError(
                    "no hooks on all modules there are: those that a cut goes through would run them on every stage",
                    getattr(hook, "__qualname__", repr(hook)),
                    "put them on the modules that are meant",
                )

    def _refuse_parted_hooks(self, path: Path) -> None:
        """A tied parameter's gradient comes in parts, one from each stage that uses it: a hook would see parts."""
        every = dict(self.model.named_parameters(remove_duplicate=False))
        for name, events in path.trace.parameters().items():
            kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
            hooks = [hook for kind in kinds for hook in (getattr(every[name], kind, None) or {}).values()]
            if hooks and len({path.stage_of(at) for at in events}) > 1:
                raise SplitError(
                    "no hook on a parameter that several stages use",
                    f"{getattr(hooks[0], '__qualname__', repr(hooks[0]))} on {name!r}",
                    "cut where one stage has all its uses, or take the hook away",
                )


_EVERYWHERE = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


_ANY = "a float or an object"  # of no size, but open code may decide by it: such paths are walked each time


def _refuse_compiled(model: nn.Module) -> None:
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise SplitError(
            "a model whose own code can be run in parts",
            f"{type(getattr(model, '_orig_mod', model)).__name__} compiled as a whole",
            "compile its blocks instead: model.block = torch.compile(model.block)",
        )


def _mark(value: Any, sizes: list[Any]) -> Any:
    """The kind of a value: containers, names, types. Shapes and numbers are put into `sizes`."""
    if isinstance(value, torch.Tensor):
        sizes.append(tuple(value.shape))
        return (value.dtype, value.dim(), value.requires_grad)
    if isinstance(value, (list, tuple)) and value and all(isinstance(part, str) for part in value):
        sizes += (len(value), _ANY)  # one a row, most likely: other words make no other path
        return (type(value), str)
    if tree.is_container(value):
        return (type(value), tuple(tree.keys(value)), tuple(_mark(part, sizes) for part in tree.parts(value)))
    if isinstance(value, (bool, str, bytes, type(None), torch.dtype, torch.device, Enum)):
        return (type(value), value)
    sizes.append(value if type(value) is int else _ANY)
    return type(value)


__all__ = ["Passage", "Path", "PathChangedError", "Split"]
