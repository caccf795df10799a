"""Record a trace: a walk that runs every event and records what it reads, computes, changes and uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.errors import SplitError
from penstock.model import tree
from penstock.model.absent import without_weights, written_out
from penstock.model.additions import Containers
from penstock.model.allowed import refuse_shared_inputs
from penstock.model.batchnorm import is_deferred
from penstock.model.counting import PLAIN, Operations
from penstock.model.fakes import HOME, is_fake
from penstock.model.materialise import is_weightless
from penstock.model.naming import alike, name_of, places, settle_names
from penstock.model.seeding import draws, host_draws, mixed, set_draws, torch_seeded
from penstock.model.trace import DATA, HOOKS, Event, Note, Trace, Value, answer, hollow, is_fixed
from penstock.model.untouched import copied, no_side_effects, untouched
from penstock.model.walk import Layout, Walk, users_line
from penstock.model.written import Written, place


def trace(
    layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any], chance: int = 0, weights: bool = True
) -> Trace:
    """Run the model once on an example and return the trace. The model and the random state are not changed.

    Random numbers that open code draws depend on `chance`. Without `weights`, or where some are missing, all are
    replaced by stand-ins, so that every process records the same trace.
    """
    given = tree.tensors((args, kwargs))

    def find() -> Trace:
        try:
            return _recorded(layout, copied((args, kwargs)), chance, saved_tensors_hooks(lambda tensor: None, _unsaved))
        except (_UnsavedError, RuntimeError) as error:  # the forward itself asks for gradients
            if not isinstance(error, _UnsavedError) and "saved tensor hooks" not in str(error):
                raise
            return _recorded(layout, copied((args, kwargs)), chance, nullcontext())

    bare = not weights or is_weightless(layout.model)
    home = next((tensor.device for tensor in given), HOME)
    seen = without_weights(layout.model, home, find) if bare else find()
    layout.read_parameters()
    refuse_shared_inputs(seen, [place(tensor) for tensor in given])
    return seen


def _recorded(layout: Layout, inputs: Any, chance: int, saving: AbstractContextManager[Any]) -> Trace:
    args, kwargs = inputs
    layout.read_parameters()
    with untouched(layout.model), Operations(Written(layout)) as counter, saving:
        recorder = _Recorder(layout, inputs, counter, chance)
        try:
            with recorder.effects, recorder.host:
                output = recorder.forward(args, kwargs)
                rolls = recorder.host.moved
            return recorder.finished(output, rolls)
        finally:
            counter.written.put_back()
            for generator, state in recorder.generators.items():
                generator.set_state(state)


class _UnsavedError(Exception):
    """A backward during a trace, which saves no tensors for it, as they would take the memory of the whole model."""


def _unsaved(_: None) -> torch.Tensor:
    raise _UnsavedError


_FILLS = frozenset(
    ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
)


class _Recorder(Walk):
    """The walk that records a trace."""

    def __init__(self, layout: Layout, inputs: Any, counter: Operations, chance: int) -> None:
        super().__init__(layout)
        self.counter, self.chance = counter, chance
        self.host = host_draws(chance)
        self.drawn: Counter[int] = Counter()  # number of events with random numbers, by their common name
        # whether weights are stand-ins of one expanded row
        self.repeated = any(not is_fake(p) and 0 in p.stride() and p.numel() > 1 for p in layout.model.parameters())
        self.effects = no_side_effects(self, lambda: len(self.events), self.state_read)
        self.events: list[Event] = []
        self.values: list[Value] = []
        self.results: list[Any] = []
        self.quiet: set[str] = set()
        self.notes: dict[str, list[Note]] = {"hooks": [], "looks": [], "sides": []}
        self.kept: list[Any] = []  # kept alive, so that no id() is reused
        self.known: dict[int, int] = {}  # id() of a tensor -> its value
        self.memory: dict[int, dict[int, torch.Tensor]] = {}  # storage -> tensors in it, by id()
        # tensors that outlive the event that made them though it did not return them, and that event
        self.born: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
        self.answers: list[Any] = []
        self.decided = 0
        self.watch = _Inside(self)
        self.given: set[int] = set()  # ids of the running event's arguments
        self.used: set[str] = set()  # parameters and buffers that the running event used
        self.constants: set[int] = set()
        self.generators: dict[torch.Generator, torch.Tensor] = {}  # generators used, and their states before
        self.own = False  # whether the running event used one of them
        for tensor, where in zip(tree.tensors(inputs), places(inputs), strict=True):
            self.add(tensor, -1, True, name_of("input", where))
        self.inputs = len(self.values)
        self.buffers = dict(layout.model.named_buffers())
        self.buffer_names = {id(buffer): name for name, buffer in self.buffers.items()}
        self.versions = {name: _version(buffer) for name, buffer in self.buffers.items()}
        for name, buffer in self.buffers.items():
            self.add(buffer, -1, True, name_of("buffer", name))

    def add(self, tensor: torch.Tensor, made_by: int, free: bool, key: int) -> int:
        self.kept.append(tensor)
        self.known[id(tensor)] = len(self.values)
        size = tensor.numel() * tensor.element_size()
        storage = place(tensor)
        if storage:
            self.memory.setdefault(storage, {})[id(tensor)] = tensor
        shape = tuple(tensor.shape)
        self.values.append(Value(made_by, free, tensor.requires_grad, size, storage, shape, tensor.dtype, key))
        return len(self.values) - 1

    def number(self, tensor: torch.Tensor) -> int:
        """Return the value of a tensor. A tensor that no event returned is a constant, or was kept by an event on the
        side."""
        value = self.known.get(id(tensor))
        if value is not None:
            return value
        maker = self.born.get(tensor)
        if maker is not None and maker < len(self.events):
            value = self.add(tensor, maker, self.events[maker].free, name_of("aside", self.events[maker].alike))
            self.note("sides", "a tensor", value)
        else:
            value = self.add(tensor, -1, True, name_of("constant", tuple(tensor.shape), tensor.dtype))
        self.constants.add(value)
        return value

    def note(self, kind: str, what: str, value: int) -> None:
        self.notes[kind].append(Note(what, value, len(self.events), users_line()))

    def atom(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = None if name.startswith("(") else self.layout.model.get_submodule(name)
        own = () if module is None else (*module.parameters(), *module.buffers())
        names = {self.layout.parameters.get(id(tensor)) or self.buffer_names.get(id(tensor), "") for tensor in own}
        ready = written_out(module) if self.repeated and module is not None else nullcontext()
        with self.host.in_module(), ready:
            return self.event(name, True, names, call, args, kwargs)

    def glue(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.event(name, False, set(), call, args, kwargs)

    def event(
        self, name: str, atom: bool, used: set[str], call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        where = zip(tree.tensors((args, kwargs)), places((args, kwargs)), strict=True)
        read = [(t, at) for t, at in where if id(t) not in self.layout.parameters]
        given = [tensor for tensor, _ in read]  # before the call, which may add to containers
        self.given = {id(tensor) for tensor in given}
        self.used = used | {
            self.layout.parameters.get(id(t)) or self.buffer_names.get(id(t), "") for t in tree.tensors((args, kwargs))
        }
        shared = alike(name, (args, kwargs), self.called)
        versions, before = [_version(tensor) for tensor in given], self.counter.total
        self.counter.mark = 0
        drawn = draws()
        self.own = self.met_generators(args, kwargs)
        written = self.counter.written
        writes = written.writes
        written.setting(call, args)
        containers = Containers((args, kwargs)) if atom else None
        result = self.native(call, args, kwargs)
        if not atom and written.writes > writes:
            written.refuse_open()
        changed = [t for t, version in zip(given, versions, strict=True) if _version(t) != version]
        made = list(tree.tensors(result))
        if not made and not changed and not atom:
            self.looked(name, (args, kwargs), given, result)
            return result
        drew = self.own or not all(map(torch.equal, drawn, draws()))
        seed = None
        if drew and not (atom or self.own) and self.is_free(given, made) and (not changed or _overwrites(name)):
            self.drawn[shared] += 1
            seed = name_of(shared, self.drawn[shared])
            set_draws(drawn)
            with torch_seeded(mixed(self.chance, seed)):
                result = self.native(call, args, kwargs)
        if atom:
            result = self.apart(result, changed)
        additions = containers.additions() if containers is not None else []
        free = seed is not None or not (atom or drew or not all(map(self.is_own, self.sharing(changed))))
        flops, mark = self.counter.total - before, self.counter.mark
        event = Event(name, atom, users_line(), (), (), (), (), (), free, flops, mark, alike=shared, seed=seed)
        event = replace(event, places=tuple(at for _, at in read), additions=tuple(one for one, _ in additions))
        self.record(event, given, (result, [value for _, value in additions]) if additions else result, changed)
        return result

    def called(self, tensor: torch.Tensor) -> object:
        """Return the name of a tensor among an event's arguments."""
        name = self.layout.parameters.get(id(tensor))
        return self.values[self.number(tensor)].key if name is None else name

    def is_free(self, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
        """Whether a function's result depends on nothing but inputs."""
        return all(self.values[self.number(t)].free for t in given) and not any(t.requires_grad for t in made)

    def sharing(self, changed: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors changed by changes in place: all in the same memory."""
        shared = {id(t): t for one in changed for t in self.memory.get(place(one), {id(one): one}).values()}
        return list(shared.values())

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Whether every stage has its own copy of a tensor, in memory that nothing else shares, so that it may change
        it."""
        value = self.values[self.number(tensor)]
        mine = value.free and value.made_by >= 0 and tensor.layout is torch.strided
        return mine and tensor.untyped_storage().resizable()  # memory of NumPy is not

    def apart(self, result: Any, changed: list[torch.Tensor]) -> Any:
        """Return the result of an atom with returned arguments as values of their own: next time it may return
        something else, and later stages must not confuse the two."""
        same = self.given - {id(tensor) for tensor in changed}
        return tree.replace(result, lambda t: torch.ops.aten.alias(t) if id(t) in same else t)

    def looked(self, name: str, arguments: Any, given: list[torch.Tensor], result: Any) -> None:
        """Record a function without tensors in its result."""
        self.quiet.add(name)
        short = name.rsplit(".", 1)[-1]
        if short in HOOKS and not given:
            raise SplitError(
                "no hook put on a parameter by code that every stage runs", f"one at {users_line()}", "do it once"
            )
        if short in DATA and not is_fixed(self.values, [self.known.get(id(t)) for t in tree.tensors(arguments)]):
            self.answers.append(answer(result))
            self.decided = len(self.events)
        for value in map(self.number, given):
            self.values[value].asked = True
            if short in HOOKS:
                self.note("hooks", short, value)
            elif short in DATA and not self.values[value].free:
                self.note("looks", short, value)

    def record(self, event: Event, given: list[torch.Tensor], result: Any, changed: list[torch.Tensor]) -> None:
        at = len(self.events)
        reads = tuple(self.number(tensor) for tensor in given)
        for value in reads:
            self.values[value].read_by.append(at)
        fixed = self.layout.parameters
        made = [tensor for tensor in tree.tensors(result) if id(tensor) not in fixed]
        parameters = tuple(sorted(name for name in self.used if name and name not in self.buffers))
        free = event.free and not parameters and all(self.values[value].free for value in reads)
        free = free and not any(tensor.requires_grad for tensor in made)
        changes = tuple(
            (
                self.known[id(t)],
                self.add(t, at, free, name_of("changed", event.alike, self.values[self.known[id(t)]].key)),
            )
            for t in self.sharing(changed)
        )
        named = [(t, p) for t, p in zip(tree.tensors(result), places(result), strict=True) if id(t) not in fixed]
        makes = tuple(
            self.known[id(t)] if id(t) in self.known else self.add(t, at, free, name_of(event.alike, place))
            for t, place in named
        )
        if free and event.seed is None and not changes and not any(self.used):
            for value in makes if all(self.values[value].fixed for value in reads) else ():
                self.values[value].fixed |= self.values[value].made_by == at
        self.events.append(
            replace(
                event,
                reads=reads,
                makes=makes,
                changes=changes,
                parameters=parameters,
                buffers=tuple(sorted(self.used & self.buffers.keys())),
                free=free,
                loose=any(value in self.constants for value in reads),
                talks=any(not isinstance(leaf, (torch.Tensor, type(None))) for leaf in tree.leaves(result)),
                region=self.region(),
            )
        )
        self.results.append(self.layout.hollow(result))

    def region(self) -> int | None:
        """Return the user's checkpoint around open code, which is recomputed as a whole."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
            return None
        self.kept.append(hooks[0])
        return id(hooks[0])

    def transformed(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        for tensor in tree.tensors((args, kwargs)):
            while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                tensor = torch._C._functorch.get_unwrapped(tensor)
            value = self.known.get(id(tensor))
            made = self.layout.is_parameter(tensor) or (value is not None and not self.values[value].free)
            if made or tensor.requires_grad:
                raise SplitError(
                    "transforms of torch.func between modules to be given nothing but inputs",
                    f"{name} of what the model makes, inside one at {users_line()}",
                    "keep the transform inside one block",
                )

    def native(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.watch:
            return super().native(call, args, kwargs)

    def made_inside(self, result: Any) -> Any:
        """Record tensors that were created inside the running event."""
        for tensor in tree.tensors(result):
            if id(tensor) not in self.known and tensor not in self.born:
                self.born[tensor] = len(self.events)
        return result

    def met_generators(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a function has a generator of the user's among its arguments; record it."""
        found = [part for part in (*args, *kwargs.values()) if isinstance(part, torch.Generator)]
        for generator in found:
            self.generators.setdefault(generator, generator.get_state())
            self.own = True
        return bool(found)

    def used_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record tensors that the running event used though they are not among its arguments."""
        self.met_generators(args, kwargs)
        tensors = tree.tensors((args, kwargs))
        self.counter.written.used(tensors)
        for tensor in tensors:
            name = self.layout.parameters.get(id(tensor)) or self.buffer_names.get(id(tensor))
            if name is not None:
                self.used.add(name)
            elif id(tensor) not in self.given:
                maker = self.values[self.known[id(tensor)]].made_by if id(tensor) in self.known else None
                maker = self.born.get(tensor) if maker is None else maker
                if maker is not None and 0 <= maker < len(self.events) and not self.events[maker].free:
                    self.given.add(id(tensor))  # recorded once
                    if id(tensor) not in self.known:
                        self.add(tensor, maker, False, name_of("aside", self.events[maker].alike))
                    self.note("sides", "a tensor", self.known[id(tensor)])

    def state_read(self, made_by: int) -> None:
        """Record that code read an attribute that an event has set on a module: a value that cannot be sent."""
        if made_by < len(self.events):
            self.values.append(Value(made_by, False, False, 0, 0, (), torch.uint8, 0))
            self.note("sides", "an attribute", len(self.values) - 1)

    def finished(self, output: Any, rolls: bool) -> Trace:
        returned = tuple(self.number(t) if id(t) not in self.layout.parameters else -1 for t in tree.tensors(output))
        for value in returned:
            if value >= 0:
                self.values[value].read_by.append(len(self.events))
        self.settle_buffers()
        settle_names(self.events, self.values, dict(zip(places(output), returned, strict=True)))
        read = {value for event in self.events for value in event.reads} | {v for v in returned if v >= 0}
        numbers = {name: self.inputs + at for at, name in enumerate(self.buffers)}
        before = {value for event in self.events for value, _ in event.changes}
        return Trace(
            self.events,
            self.values,
            returned,
            frozenset(self.quiet),
            self.results,
            hooks=tuple(self.notes["hooks"]),
            looks=tuple(self.notes["looks"]),
            sides=tuple(self.notes["sides"]),
            buffers=tuple(
                (name, value) for name, value in numbers.items() if value in read or self.values[value].asked
            ),
            inputs=frozenset(value for value in before if value < self.inputs),
            withheld=frozenset(
                type(leaf) for leaf in tree.leaves(output) if not isinstance(leaf, torch.Tensor) and self.holds(leaf)
            ),
            answers=tuple(self.answers),
            decided=self.decided,
            rolls=rolls,
            chance=self.chance,
            generators=tuple(self.generators),
            written=self.counter.written.settle(),
            kept={(self.layout.names[m], name): at for (m, name), at in self.effects.kept_inside.items()},
            result=tree.replace(output, hollow),
        )

    def settle_buffers(self) -> None:
        """Mark results of buffers that the forward changes as not free: they differ between stages."""
        kept = {
            f"{name}.{buffer}".lstrip(".")
            for name, module in self.layout.model.named_modules()
            if is_deferred(module)
            for buffer, _ in module.named_buffers(recurse=False)
        }  # batch statistics are updated by the step, not by the forward
        changed = {name for name, b in self.buffers.items() if _version(b) != self.versions[name]}
        for at, event in enumerate(self.events):
            touched = tuple(name for name in event.buffers if name in changed)
            free = event.free and not touched and all(self.values[value].free for value in event.reads)
            if event.free and not free:
                for value in event.makes:
                    self.values[value].free = False
            self.events[at] = replace(event, buffers=tuple(n for n in touched if n not in kept), free=free)

    def holds(self, leaf: Any, depth: int = 4) -> bool:
        """Whether an object that is no container holds tensors that events computed."""
        if isinstance(leaf, torch.Tensor):
            value = self.known.get(id(leaf))
            return leaf in self.born or (value is not None and not self.values[value].free)
        if not depth or isinstance(leaf, PLAIN) or callable(leaf):
            return False
        inner = list(getattr(leaf, "__dict__", {}).values())
        if isinstance(leaf, (list, tuple, set, frozenset)):
            inner += list(leaf)
        if isinstance(leaf, dict):
            inner += list(leaf.values())
        return any(self.holds(part, depth - 1) for part in inner)


class _Inside(TorchFunctionMode):
    """A mode that observes the torch functions inside events, which a trace does not record one by one."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.recorder.used_inside(args, kwargs)
        self.recorder.counter.written.setting(func, args)
        return self.recorder.made_inside(func(*args, **kwargs))


def _overwrites(name: str) -> bool:
    """Whether a function fills a tensor with random numbers, independently of its content, so that it can be
    repeated."""
    return name.rsplit(".", 1)[-1] in _FILLS


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
