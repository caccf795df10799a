"""A model as stages: its own submodules, cut before some of their calls.

A forward may depend on the structure of its inputs (an optional mask, an int, train or eval mode), so there is one
*path* for each kind of input, traced when it first occurs. The cuts are at the same modules on every path.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.errors import SplitError
from penstock.model.chain import Chain
from penstock.model.cuts import balanced, fullest_trace, open_enough, open_for
from penstock.model.flags import flags_of
from penstock.model.hooks import refuse_compiled, refuse_open_hooks, refuse_parted_hooks
from penstock.model.kinds import ANY, Kind, Outlook, kind_of_inputs
from penstock.model.passage import Passage
from penstock.model.path import Path, path_through
from penstock.model.record import trace
from penstock.model.replay import Done, PathChangedError, Replay
from penstock.model.trace import Trace
from penstock.model.walk import Layout

PATHS = 256  # paths to remember for one kind of inputs: a model that drops layers at random has one for each pattern


class Cuts(NamedTuple):
    """The cuts of a model, as one process has decided them for all."""

    opened: frozenset[str]  # modules whose own code every stage runs
    calls: tuple[tuple[str, int], ...]  # the modules at whose calls stages begin, and those events' names


class Split:
    """The stages of one model, found with an example of its inputs."""

    def __init__(
        self,
        model: nn.Module,
        pieces: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cuts: list[str] | Cuts | None = None,
        seen: Trace | None = None,  # a trace of the example with the same modules open
        avoid: frozenset[int] = frozenset(),  # names of events at which not to cut
    ) -> None:
        refuse_compiled(model)
        self.model, self.pieces = model, pieces
        self.cuts: list[tuple[str, int]] = []
        # A context for traces, which run the whole model: it moves all weights to the device.
        self.tracing: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.whole = True  # whether all weights are in this process
        if pieces == 1:
            self.layout = Layout(model, frozenset())  # nothing to cut: the model itself is the only atom
            seen = trace(self.layout, args, kwargs)
        elif cuts is None:
            self.layout, seen = open_enough(model, pieces, args, kwargs)
            refuse_open_hooks(self.layout, self.pieces)
            self.cuts = balanced(model, seen, pieces, avoid)
        else:
            self.layout = Layout(model, cuts.opened if isinstance(cuts, Cuts) else open_for(model, cuts))
            refuse_open_hooks(self.layout, self.pieces)
            seen = seen or fullest_trace(self.layout, args, kwargs)
            if isinstance(cuts, Cuts):
                self.cuts = [(name, _nth_call(seen, name, key)) for name, key in cuts.calls]
            else:
                self.cuts = [(name, 0) for name in map(self._called, cuts)]
        self.paths: dict[Any, list[Path]] = {}
        self.homes: dict[str, int] = {}  # the stage of every module, once the example's path is known
        self.edges: tuple[tuple[int, int], ...] = ()  # known once the example's path is
        seen = self._settled(seen, args, kwargs)
        self.first = self._learn(seen, kind_of_inputs(args, kwargs, self.outlook()))  # the example's path
        self.owner = self._owners(self.first)
        self.homes = self._homes(self.first)
        chain = {(stage, stage + 1) for stage in range(pieces - 1)}
        # stages that exchange data on the example's path, and all neighbours
        self.edges = tuple(sorted(chain | set(self.first.edges)))

    def outlook(self) -> Outlook:
        """Return the state of the model that decides its path; raise if it has hooks that no cut allows."""
        refuse_open_hooks(self.layout, self.pieces)
        modes = (torch.is_grad_enabled(), *[module.training for module in self.layout.modules])
        return Outlook(modes, *flags_of(self.layout.open))

    def decided(self) -> Cuts:
        """Return the cuts, for other processes to use the same."""
        events = self.first.trace.events
        calls = tuple((events[at].name, events[at].key) for at in self.first.starts[1:])
        names = self.layout.names
        return Cuts(frozenset(names[id(module)] for module in self.layout.open), calls)

    def path(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outlook: Outlook | None = None,
        chance: int = 0,
        passage: Passage | None = None,
    ) -> Path:
        """Return the path of these inputs. An outlook is valid as long as nobody changes the model; `chance` seeds
        random numbers between its modules. Results computed meanwhile that stages of one process may share are added to
        `passage`."""
        kind = kind_of_inputs(args, kwargs, outlook or self.outlook())
        found = self._known(kind, args, kwargs, chance, passage or Passage())
        if found is not None:
            return found.noted(kind, Passage())
        with self.tracing():
            seen = self._settled(self._traced(args, kwargs, chance), args, kwargs)
        return self._learn(seen, kind)

    def _known(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], chance: int, passage: Passage
    ) -> Path | None:
        """Return the known path of these inputs, or None. The answers of a walk before it leaves a path rule out other
        paths with different answers."""
        answers: tuple[Any, ...] = ()
        for path in self.paths.get(kind.marks, ()):
            if not _contradict(answers, path.trace.answers):
                taken, told = self._takes(path, kind, args, kwargs, chance, passage)
                if taken:
                    return path
                answers = max(answers, told, key=len)
        return None

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any], chance: int = 0) -> Trace:
        return trace(self.layout, args, kwargs, chance, self.whole)

    def _settled(self, seen: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        """Return a trace that the next forward will follow: a second one, where the user's caches were filled in the
        first."""
        self._enter(seen)
        walk = self._walked(seen, Passage.of(seen), len(seen.events), args, kwargs, seen.chance)
        return seen if walk.at == len(seen.events) else self._traced(args, kwargs, seen.chance)

    def forget(self, path: Path) -> None:
        """Forget a path, so that inputs of its kind are traced again, if all weights are in this process."""
        if self.whole:
            for known in self.paths.values():
                known[:] = [one for one in known if one is not path]

    def _enter(self, seen: Trace) -> None:
        """Have calls of the modules that open code calls come to walks."""
        names = {event.name for event in seen.events if event.atom}
        strange = any(name.startswith("(") for name in names)
        self.layout.entries.learn(None if strange else map(self.model.get_submodule, names))

    def _learn(self, seen: Trace, kind: Kind) -> Path:
        self._enter(seen)
        known = self.paths.setdefault(kind.marks, [])
        for path in known:
            if path.trace.signature == seen.signature:
                return path.noted(kind, Passage.of(seen))
        fresh = path_through(seen, self.cuts, self.homes, self.edges)
        refuse_parted_hooks(self.model, fresh)
        if not self.whole:
            self._require_weights(fresh)
        known[: len(known) + 1 - PATHS] = []
        known.append(fresh)
        return fresh.noted(kind, Passage.of(seen))

    def _takes(
        self,
        path: Path,
        kind: Kind,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        chance: int,
        passage: Passage,
    ) -> tuple[bool, tuple[Any, ...]]:
        """Return whether these inputs take a path, as far as it can be determined without running the model, and the
        answers about data that open code got until then.

        Shapes, answers about data, and random numbers decide. Which shapes the model computes for new sizes is unknown;
        where open code reads them, only a trace can tell.
        """
        seen, told = path.trace, path.sizes.get(kind.sizes)
        if told is None and seen.asks:
            return False, ()
        sure = told is not None and ANY not in kind.sizes and kind.numbers in path.numbers
        if sure and not seen.decides:
            return True, ()
        if told is not None and sure and not seen.rolls:
            walk = self._walked(seen, told, seen.decided, args, kwargs, chance)
            if walk.at == seen.decided and tuple(walk.answers) == seen.answers:
                passage.common = walk.computed()
                return True, ()
        walk = self._walked(seen, told or Passage(), len(seen.events), args, kwargs, chance, not sure)
        return walk.at == len(seen.events) and walk.rolled == seen.rolls, tuple(walk.answers)

    def _walked(
        self,
        seen: Trace,
        told: Passage,
        stop: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        chance: int,
        rolls: bool = False,
    ) -> Replay:
        """Walk up to an event, skipping all of them; the walk ends before if the inputs take another path. With
        `rolls`, it records draws from the host's random numbers even where the trace had none."""
        end = len(seen.events)
        walk = Replay(
            self.layout,
            seen,
            (end, end),
            {},
            frozenset(),
            Passage(told.shapes, told.plain, told.grads),
            stop=stop,
            chance=chance,
            strict=True,
            rolls=rolls,
        )
        inputs = walk.meet_inputs((args, kwargs))
        try:
            walk.forward(*inputs)
        except Done:
            return walk
        except Exception:  # the user's code may fail on stand-ins; a trace will show the real path
            walk.at = -1
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
        chance: int = 0,
    ) -> tuple[dict[int, torch.Tensor], Any]:
        """Run one stage's part of a forward. Return the values that later stages need, and on the last stage the
        model's result."""
        if not self.walks(path, stage):
            return self._called_alone(path, stage, received, passage, args, kwargs, around)
        replay = Replay(
            self.layout,
            path.trace,
            path.span(stage),
            received,
            path.outgoing[stage],
            passage,
            around,
            chance=chance,
            last=stage == self.pieces - 1,
        )
        try:
            result = replay.run(args, kwargs)
        except PathChangedError:
            self.forget(path)
            raise
        return replay.made, result

    def watched(self) -> AbstractContextManager[None]:
        """Observe calls of modules once around many walks: each walk would otherwise install and remove the observation
        itself."""
        return nullcontext() if isinstance(self.model, Chain) else self.layout.entries

    def walks(self, path: Path, stage: int) -> bool:
        """Whether a stage runs code of the model around its own modules, which a walk has to observe."""
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
        """Run a stage module that the user made, from one tensor to one tensor, without code around it."""
        (made,) = path.trace.events[stage].makes
        assert isinstance(self.model, Chain)
        module = self.model.stages[stage]
        with around():
            result = module(*received.values()) if stage else module(*args, **kwargs)
        if type(result) is not torch.Tensor:
            self.forget(path)
            raise PathChangedError(f"a {type(result).__name__} of stage {stage}, where its trace gave a tensor")
        if path.trace.values[made].asked:
            passage.tell(made, (tuple(result.shape), result.dtype))
        wanted = made in path.outgoing[stage]
        return {made: result} if wanted else {}, None if wanted else result

    def parameters(self, stage: int) -> dict[str, nn.Parameter]:
        """Return the parameters that a stage owns, by the model's own names; a tied one belongs to the first stage that
        uses it."""
        named = dict(self.model.named_parameters())
        return {name: parameter for name, parameter in named.items() if self.owner[name] == stage}

    def uses(self, stage: int) -> set[str]:
        """Return the names of the parameters that a stage needs: those its forward uses, tied ones too, and those it
        owns."""
        used = self.first.trace.parameters().items()
        named = {name for name, events in used if any(self.first.stage_of(at) == stage for at in events)}
        return named | {name for name, owner in self.owner.items() if owner == stage}

    def used(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters that a stage needs, each once."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        return list({id(named[name]): named[name] for name in sorted(self.uses(stage))}.values())

    def buffer_stages(self) -> dict[str, int]:
        """Return the stage of every buffer inside an atom, by name. Other buffers are equal on every stage."""
        found: dict[int, int] = {}
        for at, event in enumerate(self.first.trace.events):
            if event.atom:
                for buffer in self._submodule(event.name).buffers():
                    found.setdefault(id(buffer), self.first.stage_of(at))
        named = self.model.named_buffers(remove_duplicate=False)
        return {name: found[id(buffer)] for name, buffer in named if id(buffer) in found}

    def ties(self) -> dict[str, tuple[int, ...]]:
        """Return the parameters that several stages use, with those stages, the owner first."""
        canonical = {id(parameter): name for name, parameter in self.model.named_parameters()}
        every = dict(self.model.named_parameters(remove_duplicate=False))
        users: dict[str, set[int]] = {}
        for name, events in self.first.trace.parameters().items():
            users.setdefault(canonical[id(every[name])], set()).update(map(self.first.stage_of, events))
        return {name: tuple(sorted(stages)) for name, stages in sorted(users.items()) if len(stages) > 1}

    def modules(self, path: Path, stage: int) -> list[nn.Module]:
        """Return the modules that a stage runs on a path: those of its atoms, and the open ones around them."""
        first, last = path.span(stage)
        names = {event.name for event in path.trace.events[first:last] if event.atom}
        return [*self.layout.open, *(m for name in sorted(names) for m in self._submodule(name).modules())]

    def kept_by_others(self, path: Path, stage: int) -> dict[tuple[int, str], str]:
        """Return the attributes that the forwards of other stages set, by module and name, with their description."""
        return {
            (id(self._submodule(module)), name): f"{module}.{name}"
            for (module, name), at in path.trace.kept.items()
            if path.stage_of(at) != stage
        }

    def _submodule(self, name: str) -> nn.Module:
        try:
            return self.model.get_submodule(name)
        except AttributeError:
            return nn.Identity()  # called, but not part of the model

    def _owners(self, path: Path) -> dict[str, int]:
        """Return the stage of every parameter of the model, so that none is left out."""
        canonical = {id(parameter): name for name, parameter in self.model.named_parameters()}
        used: dict[str, int] = {}
        every = dict(self.model.named_parameters(remove_duplicate=False))
        for name, events in path.trace.parameters().items():
            stage = path.stage_of(min(events))
            key = canonical[id(every[name])]
            used[key] = min(used.get(key, stage), stage)
        owner, last = {}, 0
        known = set(canonical.values())
        for module, held in self.model.named_modules():
            for inner in sorted(held._parameters):  # sorted, as a module may register them in the order of a set
                name = f"{module}.{inner}".lstrip(".")
                if name in known:
                    last = used.get(name, last)  # a parameter that the forward does not use stays with its neighbours
                    owner[name] = last
        return {name: owner[name] for name in canonical.values()}

    def _homes(self, path: Path) -> dict[str, int]:
        """Return the stage of every module: that of its first call, or of its weights if the example does not call
        it."""
        found = {}
        for name, module in self.model.named_modules():
            owners = [
                self.owner[f"{name}.{inner}"]
                for inner, _ in module.named_parameters()
                if f"{name}.{inner}" in self.owner
            ]
            if owners:
                found[name] = min(owners)
        for at, event in reversed(list(enumerate(path.trace.events))):
            if event.atom:
                found[event.name] = path.stage_of(at)
        return found

    def _require_weights(self, path: Path) -> None:
        """Raise if a stage of this path uses weights that it does not hold, where each process has only its own."""
        used = [self.uses(stage) for stage in range(self.pieces)]
        for at, event in enumerate(path.trace.events):
            stage = path.stage_of(at)
            for name in event.parameters:
                if name not in used[stage]:
                    raise SplitError(
                        "inputs with which every stage uses weights that it uses with the example, too",
                        f"{name!r}, which stage {stage} uses at {event.line} with these inputs alone",
                        "make the Pipeline with an example that makes the most of the model: such inputs",
                    )

    def _called(self, name: str) -> str:
        """Return the name under which walks know a module with several names."""
        return str(self.layout.names[id(self.model.get_submodule(name))])


def _contradict(answers: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether a yes-or-no answer differs. Numbers may differ without consequences."""
    pairs = zip(answers, others, strict=False)
    return any(type(a) is bool and type(b) is bool and a is not b for a, b in pairs)


def _nth_call(seen: Trace, name: str, key: int) -> int:
    """Return the index of this event among a module's calls."""
    calls = [event.key for event in seen.events if event.atom and event.name == name]
    if key not in calls:
        raise SplitError(
            "the same forward on every rank",
            f"one that does not call {name!r} as rank 0's does, with the same arguments",
            "go through lists or sorted(...) in place of sets, and draw no random numbers that differ between ranks",
        )
    return calls.index(key)
