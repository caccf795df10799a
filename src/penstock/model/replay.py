"""One stage's part of a forward: it runs its own events, skips earlier ones, and leaves the forward at its end.

Skipped events return stand-ins to the code around them: tensors of the right shape and type without memory. Where this
stage needs a value of an earlier one, the received tensor is returned instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn

from penstock.errors import SplitError
from penstock.model import tree
from penstock.model.additions import Place, add, added, list_lengths
from penstock.model.passage import Common, Passage, Withheld
from penstock.model.seeding import draws, host_draws, mixed, torch_seeded
from penstock.model.trace import DATA, HOOKS, Event, StandIn, Trace, answer, is_fixed, stands_for
from penstock.model.walk import Layout, Walk, function_name, transform_level, users_line

_NOTHING = nullcontext()
_DEVICE = "torch.Tensor.device.__get__"  # equal on every stage; a trace with fake weights does not observe it


class PathChangedError(SplitError):
    """The forward reached another event than its trace. The path is forgotten: if all weights are in this process, the
    next attempt at the step traces it again."""

    def __init__(self, what: str) -> None:
        super().__init__(
            "a forward that takes the path it took on its trace", what, "keep such decisions inside one block"
        )


class Done(BaseException):
    """Raised after the stage's last event to leave the forward. Not an Exception, so that no handler of the user's
    catches it."""


class Replay(Walk):
    """A walk that runs events `first` to `last` of a trace."""

    def __init__(
        self,
        layout: Layout,
        plan: Trace,
        span: tuple[int, int],
        received: dict[int, torch.Tensor],
        wanted: frozenset[int],
        passage: Passage,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        stop: int | None = None,
        chance: int = 0,
        strict: bool = False,
        rolls: bool = False,
        last: bool = True,
    ) -> None:
        super().__init__(layout)
        self.last = last  # whether the model's result is returned
        self.strict = strict  # only checks whether these inputs take this path
        self.chance = chance  # seed of random numbers that open code draws
        self.host = host_draws(chance) if rolls or plan.rolls else None
        self.rolled = False
        stop = span[1] if stop is None else stop  # the event at which to leave
        self.leave = stop if stop < len(plan.events) else stop + 1
        self.plan, self.span, self.wanted, self.passage = plan, span, wanted, passage
        self.names, self.lone, self.looks_at_tensors = plan.names, plan.lone, plan.looks_at_tensors
        self.absent = plan.before(span[0])  # values that are not here, except for received ones
        self.received = dict(received)
        self.around = around  # entered for each atom, not for open code, whose functions are identified by name
        self.at = 0
        self._share()
        self.made: dict[int, torch.Tensor] = {}  # values that later stages need
        self.value: dict[int, int] = {}  # id() of a known tensor -> its value
        self.tensor: dict[int, torch.Tensor] = {}  # value -> the tensor that open code holds, kept alive
        self.answers: list[Any] = []  # results of functions that read data
        self.constants: list[torch.Tensor] = []  # results of functions that the trace does not contain
        self.device = torch.device("cpu")

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the forward on the last stage, None on others (their values are in `made`)."""
        if self.span[1] == 0:
            return None
        args, kwargs = self.meet_inputs((args, kwargs))
        self.made.update((value, t) for value, t in self.received.items() if value in self.wanted)  # to be sent on
        try:
            result = self.forward(args, kwargs)
        except Done:
            return None
        if self.at < self.span[1]:
            raise PathChangedError(f"the forward ended before event {self.at} ({self.plan.events[self.at].name})")
        return self.given_back(result) if self.last else None

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.host is None:
            return super().forward(args, kwargs)
        with self.host:
            try:
                return super().forward(args, kwargs)
            finally:
                self.rolled = self.host.moved

    def watched(self) -> AbstractContextManager[None]:
        return self.layout.entries

    def meet_inputs(self, inputs: Any) -> Any:
        """Number the inputs and buffers as in the trace; copy inputs that the forward changes."""
        if self.plan.inputs:
            numbers = iter(range(len(self.plan.values)))
            own = self.plan.inputs
            inputs = tree.replace(inputs, lambda t: t.clone() if next(numbers) in own else t)
        given = list(tree.tensors(inputs))
        for number, tensor in enumerate(given):
            self.meet(tensor, number)
        for name, number in self.plan.buffers:
            self.meet(self.layout.model.get_buffer(name), number)
        self.device = next((t.device for t in (*self.received.values(), *given)), self.device)
        return inputs

    def given_back(self, result: Any) -> Any:
        """Return the model's result, after checking that it holds the same values as the trace's."""
        fixed = self.layout.is_parameter
        held = tuple(-1 if fixed(t) else self.value.get(id(t)) for t in tree.tensors(result))
        loose = {note.value for note in self.plan.sides} | {-1}
        loose |= {value for value in self.plan.returned if self.plan.values[value].made_by < 0}
        if len(held) != len(self.plan.returned) or any(
            now != then and not (now is None and then in loose)
            for now, then in zip(held, self.plan.returned, strict=True)
        ):
            raise SplitError(
                "a result made of what calls return",
                f"{len(held)} tensors where the whole model gives {len(self.plan.returned)}: modules of other stages "
                "hand theirs over on the side, by hooks or by shared objects",
                "ask the model for results that need no such collecting",
            )
        result = tree.replace(result, self.real)
        if self.plan.withheld and self.span[0] > 0:
            result = tree.replace_leaves(
                result, lambda leaf: Withheld(type(leaf)) if type(leaf) in self.plan.withheld else leaf
            )
        return result

    def meet(self, tensor: torch.Tensor, value: int) -> None:
        self.tensor[value] = tensor
        self.value[id(tensor)] = value

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or the received one in place of a stand-in."""
        value = self.value.get(id(tensor))
        if value is None:
            return tensor
        if value in self.received:
            return self.received[value]
        if self.empty(value):
            raise SplitError(
                "code that reads only what its trace read",
                f"a tensor of an earlier stage at {users_line()}",
                "keep what must go together inside one stage",
            )
        return tensor

    def empty(self, value: int) -> bool:
        """Whether open code holds a stand-in for a value."""
        return value in self.absent and value not in self.received

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle the two most frequent calls of open code directly: reading shapes, and functions that another stage of
        this process has computed. Everything else is handled as in any walk."""
        if not self.inside and transform_level() is None:
            name, at = function_name(func), self.at
            if name == self.names[at]:
                value = self.lone.get(at)
                shared = None if value is None else self.common.get(at, self.fixed.get(at))
                if value is not None and type(shared) is torch.Tensor and at < self.leave:
                    self.at = at + 1
                    self.tensor[value] = shared
                    self.value[id(shared)] = value
                    return shared
            elif name in self.looks_at_tensors and len(args) == 1:
                number = self.value.get(id(args[0]))
                if number is None or self.received.get(number) is args[0]:
                    return func(*args)
                if number not in self.received and (number not in self.absent or self.tells(name, number)):
                    return func(*args)
        return super().__torch_function__(func, types, args, kwargs)

    def tells(self, name: str, value: int) -> bool:
        """Whether a stand-in has the attribute that is read."""
        return self.looks_at_tensors[name] and self.plan.values[value].asked

    def met(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the stand-in of a skipped call with one tensor as its result directly; other calls are handled as in
        any walk."""
        at = self.at
        value = self.plan.skipped_at_once.get(at)
        first, last = self.span
        if value is None or first <= at < last or at >= self.leave or self.strict or self.names[at] != name:
            return super().met(name, module, args, kwargs)
        tensor = self.received.get(value)
        if tensor is None:
            known = self.plan.stand_ins.get(value)
            if known is None or known.told != self.passage.shapes.get(value) or value in self.tensor:
                return super().met(name, module, args, kwargs)
            tensor = known.tensor
        self.at = at + 1
        self.meet(tensor, value)
        return tensor

    def atom(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.names[self.at] != name:
            raise self.strange(name)
        return self.event(call, args, kwargs)

    def glue(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == self.names[self.at]:
            return self.event(call, args, kwargs)
        if name in self.plan.quiet or name == _DEVICE:
            return self.look(name, call, args, kwargs)
        if last_word(name) not in HOOKS and self.is_constant((args, kwargs)):
            return self.constant(name, call, args, kwargs)
        raise self.strange(name)

    def strange(self, name: str) -> PathChangedError:
        return PathChangedError(f"{name} at {users_line()}, where the trace has {self.names[self.at] or 'the end'}")

    def is_constant(self, given: Any) -> bool:
        """Whether arguments depend on inputs and constants alone, which every stage has."""
        values = [self.value.get(id(t)) if not self.layout.is_parameter(t) else -1 for t in tree.tensors(given)]
        return all(value is None or (value >= 0 and self.plan.values[value].free) for value in values)

    def constant(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that the trace does not contain because the user's code had cached its result. Each stage runs
        it."""
        drawn = draws()
        result = self.native(call, args, kwargs)
        made = tree.tensors(result)
        if any(t.requires_grad for t in made) or not all(map(torch.equal, drawn, draws())):
            raise self.strange(name)
        self.constants += made
        return result

    def look(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function without tensors in its result: shapes, types, devices; or data, which only a real tensor
        has."""
        short = last_word(name)
        given = [self.value.get(id(t)) for t in tree.tensors((args, kwargs))]
        values = [value for value in given if value is not None]
        if short in HOOKS and any(self.plan.values[v].made_by < self.span[0] for v in values):
            return _Handle()  # the stage that makes the tensor has put the hook on it
        if short in HOOKS and not torch.is_grad_enabled():
            return _Handle()  # a forward that will be run again for its backward
        if any(map(self.empty, values)):
            return self.look_at_stand_in(name, values, call, args, kwargs)
        if self.received:
            args, kwargs = tree.replace((args, kwargs), self.real)
        result = self.native(call, args, kwargs)
        if short in DATA and not is_fixed(self.plan.values, given):
            self.answers.append(answer(result))
        return result

    def look_at_stand_in(
        self, name: str, values: list[int], call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name == _DEVICE:
            return self.device
        if not all(self.plan.values[value].asked for value in values):
            raise PathChangedError(f"{name} at {users_line()} of a tensor that the trace did not look at")
        getter = name.removesuffix(".__get__").rsplit(".", 1)[-1] if name.endswith(".__get__") else ""
        if getter.startswith("is_") and getter[3:] in ("cuda", "cpu", "meta", "mps", "xpu"):
            return getter[3:] == self.device.type
        if getter == "requires_grad":
            return self.passage.grads.get(values[0], self.plan.values[values[0]].grad)
        try:
            return self.native(call, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise SplitError(
                "control flow across a cut that does not depend on data",
                f"{name.rsplit('.', 1)[-1]}() of a value that an earlier stage made, at {users_line()}",
                "keep the decision inside one block, or cut elsewhere",
            ) from error

    def event(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at = self.at
        first, last = self.span
        if at >= self.leave:
            raise Done
        self.at += 1
        event = self.plan.events[at]
        if event.free and at in self.plan.common:
            return self.share(at, event, call, args, kwargs)
        if first <= at < last or event.free:
            return self.act(at, event, call, args, kwargs)
        return self.skip(at, event, (args, kwargs))

    def share(
        self, at: int, event: Event, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return a result that depends on inputs alone: the first stage of a process computes it, the others reuse
        it."""
        results = self.fixed if at in self.plan.fixed else self.common
        found = results.get(at)
        if found is None:
            found = results[at] = self.act(at, event, call, args, kwargs)
        elif type(found) is torch.Tensor and len(event.makes) == 1:
            self.meet(found, event.makes[0])
        else:
            fixed = self.layout.is_parameter
            made = [t for t in tree.tensors(found) if not fixed(t)]
            for tensor, value in zip(made, event.makes, strict=True):
                self.meet(tensor, value)
        return found

    def _share(self) -> None:
        """Use the results that this walk shares with others."""
        self.common, self.fixed = self.passage.common.results, self.passage.fixed.results

    def computed(self) -> Common:
        """Return the results that other walks on the same inputs may share: without a graph, and none if this walk has
        copied inputs to change them."""
        if self.plan.inputs:
            return Common()
        every = {**self.common, **self.fixed}
        results = {at: r for at, r in every.items() if not any(t.requires_grad for t in tree.tensors(r))}
        return Common(results, dict(self.passage.shapes))

    def act(
        self, at: int, event: Event, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        args, kwargs = self.arguments(event, args, kwargs)
        lengths = list_lengths((args, kwargs), event.additions) if event.additions else {}
        result = self.acted(event, call, args, kwargs)
        for before, after in event.changes:
            self.changed(before, after)
        if event.atom:
            result = self.apart(event, result, args, kwargs)
        if type(result) is torch.Tensor and len(event.makes) == 1:  # the usual case
            self.keep(result, event.makes[0])
            return result
        whole = (result, self.added(event, (args, kwargs), lengths)) if event.additions else result
        every = tree.tensors(whole)
        made = [t for t in every if not self.layout.is_parameter(t)]
        if len(made) != len(event.makes) == len(every):  # a trace without weights may have seen a copy of a parameter
            made = every
        if len(made) != len(event.makes):
            raise PathChangedError(
                f"{event.name} at {users_line()} gave {len(made)} tensors, its trace {len(event.makes)}"
            )
        for tensor, value in zip(made, event.makes, strict=True):
            self.keep(tensor, value)
        if event.talks and not event.free:
            self.passage.plain[at] = self.layout.hollow(whole)
        return result

    def apart(self, event: Event, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an atom with returned arguments as values of their own, as in the trace."""
        if type(result) is torch.Tensor and not any(result is one for one in (*args, *kwargs.values())):
            return result  # the usual case
        changed = {after for _, after in event.changes}
        given = {id(t) for t in tree.tensors((args, kwargs)) if self.value.get(id(t)) not in changed}
        return tree.replace(result, lambda t: torch.ops.aten.alias(t) if id(t) in given else t)

    def acted(self, event: Event, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an event's own call and return its result."""
        if event.atom:
            with self.around(), self.host.in_module() if self.host else _NOTHING:
                return self.native(call, args, kwargs)
        if event.seed is not None:
            with torch_seeded(mixed(self.chance, event.seed)):
                return self.native(call, args, kwargs)
        return self.native(call, args, kwargs)

    def added(self, event: Event, given: Any, lengths: dict[Place, int]) -> list[Any]:
        """Return the values that an event has added to containers in its arguments, as in its trace."""
        try:
            return added(given, event.additions, lengths)
        except LookupError:
            raise PathChangedError(
                f"{event.name} at {users_line()} without what it added to a container it was given"
            ) from None

    def arguments(
        self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return an event's arguments with real tensors, each of them known from the trace."""
        swapped = False
        for tensor in tree.tensors((args, kwargs)):
            if id(tensor) in self.value:
                swapped = swapped or self.real(tensor) is not tensor
            elif not event.loose and not self.layout.is_parameter(tensor):
                if any(tensor is constant for constant in self.constants):
                    raise PathChangedError(f"{event.name} at {users_line()} of a tensor that the trace did not make")
                raise SplitError(
                    "tensors that travel through calls and results",
                    f"one kept on the side and read at {users_line()}",
                    "return it from the module that makes it and pass it on",
                )
        if not swapped:
            return args, kwargs
        if event.region is not None:
            raise SplitError(
                "a checkpointed call to be given tensors that nobody changes in place",
                f"one changed before the cut and read at {users_line()}",
                "change a copy, or cut elsewhere",
            )
        return tree.replace((args, kwargs), self.real)  # type: ignore[no-any-return]

    def keep(self, tensor: torch.Tensor, value: int) -> None:
        self.meet(tensor, value)
        if self.plan.values[value].asked:
            self.passage.tell(value, (tuple(tensor.shape), tensor.dtype))
            self._share()
        if value in self.wanted:
            self.made[value] = tensor

    def changed(self, before: int, after: int) -> None:
        """Assign a new value to a tensor; where open code holds a stand-in for it, the received tensor was changed."""
        held = self.tensor.get(before)
        if held is None:
            return
        if before in self.received and self.received[before] is not held:
            self.received[after] = self.received[before]
            self.meet(held, after)
        self.keep(self.received.get(before, held), after)

    def require_reads(self, event: Event, given: Any) -> None:
        """Raise if a skipped event has other arguments than in the trace: it would be another event."""
        if event.loose:
            return
        fixed, tensors = self.layout.is_parameter, tree.tensors(given)
        if tuple(self.value.get(id(t)) for t in tensors if not fixed(t)) != event.reads:
            raise PathChangedError(f"{event.name} at {users_line()} of other tensors than on its trace")

    def skip(self, at: int, event: Event, given: Any) -> Any:
        if self.strict:
            self.require_reads(event, given)
        for before, after in event.changes:
            if before in self.tensor:
                self.meet(self.tensor[before], after)
        kept = self.passage.plain.get(at, self.plan.results[at])
        if type(kept) is torch.Tensor and len(event.makes) == 1:  # the usual case
            return self.stand_in(kept, event.makes[0])
        numbers = iter(event.makes)

        def present(tensor: torch.Tensor) -> torch.Tensor:
            name = stands_for(tensor)
            return self.stand_in(tensor, next(numbers)) if name is None else self.layout.model.get_parameter(name)

        whole = tree.replace(kept, present)
        if not event.additions:
            return whole
        result, values = whole
        add(given, event.additions, values)
        return result

    def stand_in(self, example: torch.Tensor, value: int) -> torch.Tensor:
        """Return the stand-in for a skipped event's result."""
        if value in self.received:
            self.meet(self.received[value], value)
            return self.received[value]
        if value in self.tensor:  # an event that returns its argument
            return self.tensor[value]
        told = self.passage.shapes.get(value)
        known = self.plan.stand_ins.get(value)
        if known is None or known.told != told:
            shape, dtype = told or (example.shape, example.dtype)
            empty = torch.empty(shape, dtype=dtype, device="meta")
            known = self.plan.stand_ins[value] = StandIn(told, empty)
        self.meet(known.tensor, value)
        return known.tensor


@cache
def last_word(name: str) -> str:
    """Return the last part of a function's name."""
    return name.rsplit(".", 1)[-1]


class _Handle:
    """The handle of a hook that another stage has registered."""

    def remove(self) -> None:
        pass
