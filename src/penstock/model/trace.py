"""The record of one forward of the whole model: which event read, computed and changed which value.

Values are numbered. A tensor that an event changes in place becomes a new value, computed by that event, and so do all
tensors that share its memory. Inputs of the model, its buffers, and results of glue on them alone are *free*: every
stage has the inputs, so every stage computes these itself, and they are not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from penstock.model.additions import Addition


@dataclass(frozen=True)
class Event:
    """One call of an atom, or of a glue function."""

    name: str
    atom: bool
    line: str
    reads: tuple[int, ...]  # values
    makes: tuple[int, ...]  # one for each tensor in its result; an alias of an input keeps that input's number
    changes: tuple[tuple[int, int], ...]  # (value before, value after) of tensors changed in place
    parameters: tuple[str, ...]  # parameters used anywhere inside
    buffers: tuple[str, ...]  # buffers used inside; only those that the forward changes
    free: bool
    flops: float = 0.0
    mark: int = 0  # a hash of its operators, their order, shapes and numbers
    loose: bool = False  # reads a tensor that no event returned: a constant, or one kept on the side
    talks: bool = False  # whether its result holds more than tensors and None
    region: int | None = None  # the user's checkpoint around it
    alike: int = 0  # the name shared by events with the same call and arguments, in every process
    key: int = 0  # its unique name, equal in every process: see naming
    places: tuple[str, ...] = ()  # paths of the values it reads, within its arguments
    seed: int | None = None  # seed of random numbers that every stage draws equally
    additions: tuple[Addition, ...] = ()  # to containers in its arguments; their values follow its result


@dataclass
class Value:
    """The properties of one value in the example."""

    made_by: int  # event, -1 for an input, a buffer or a constant
    free: bool
    grad: bool
    bytes: int
    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: int  # its name in every process: see naming; until the trace is whole, the same for all that are alike
    asked: bool = False  # open code looked at its shape, type or device
    fixed: bool = False  # computed from no tensor at all, so inputs of the same sizes give the same
    read_by: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Note:
    """An operation of open code on a value between events, which only some cuts allow."""

    what: str
    value: int
    at: int  # the next event
    line: str


class StandIn(NamedTuple):
    """A tensor in place of one that an earlier stage computed."""

    told: (
        tuple[tuple[int, ...], torch.dtype] | None
    )  # its shape and type, as received from that stage; None: as in the trace
    tensor: torch.Tensor


@dataclass
class Trace:
    """All events of one forward, and other facts that a cut depends on."""

    events: list[Event]
    values: list[Value]
    returned: tuple[int, ...]  # the values in the model's result
    quiet: frozenset[str]  # functions without tensors in their results
    results: list[Any]  # results of every event, with empty tensors
    hooks: tuple[Note, ...] = ()  # tensor hooks
    looks: tuple[Note, ...] = ()  # data of events that open code read: decisions
    sides: tuple[Note, ...] = ()  # tensors that an event read though they were not among its arguments
    buffers: tuple[tuple[str, int], ...] = ()  # buffers that open code reads, and their values
    inputs: frozenset[int] = frozenset()  # inputs that the forward changes in place
    withheld: frozenset[type] = frozenset()  # types of objects in the result that several stages fill
    answers: tuple[Any, ...] = ()  # data that open code read, unless it is fixed: inputs of one kind may differ in path
    decided: int = 0  # the event before which the last of them was read
    rolls: bool = False  # whether open code draws from Python's or NumPy's random numbers, and may branch on them
    chance: int = 0  # seed of open code's random numbers
    generators: tuple[Any, ...] = ()  # generators that the forward uses and no module holds
    written: dict[str, str] = field(default_factory=dict)  # weights it changes, and where; "" where that is repeatable
    kept: dict[tuple[str, str], int] = field(default_factory=dict)  # module, attribute -> the event that sets it
    result: Any = None  # the model's result, with empty tensors
    stand_ins: dict[int, StandIn] = field(default_factory=dict)  # by value; without memory, so they are shared
    made_before: dict[int, frozenset[int]] = field(default_factory=dict)  # see `before`

    @property
    def asks(self) -> bool:
        """Whether open code read the shape or type of a value that not every stage has."""
        return any(value.asked and value.made_by >= 0 and not value.free for value in self.values)

    @property
    def decides(self) -> bool:
        """Whether inputs of one kind may take different paths."""
        return bool(self.answers) or self.rolls

    @property
    def may_drop(self) -> bool:
        """Whether open code may leave modules out at random."""
        return self.rolls or bool(self.answers and self.draws)

    @property
    def draws(self) -> bool:
        """Whether open code draws random numbers."""
        return self.rolls or any(event.seed is not None for event in self.events)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The name called at each event, and "" at the end."""
        return (*(event.name for event in self.events), "")

    @cached_property
    def common(self) -> frozenset[int]:
        """Events whose result stages in one process may share: it is equal for all, and nothing changes it."""
        changed = {before for event in self.events for before, _ in event.changes}
        return frozenset(
            at
            for at, event in enumerate(self.events)
            if event.free and not event.changes and event.region is None and not changed & {*event.makes, *event.reads}
        )

    @cached_property
    def fixed(self) -> frozenset[int]:
        """Common events whose results are equal for all inputs of the same sizes."""
        events, values = self.events, self.values
        return frozenset(
            at for at in self.common if events[at].makes and all(values[v].fixed for v in events[at].makes)
        )

    @cached_property
    def lone(self) -> dict[int, int]:
        """Values of common events whose result is a single tensor."""
        return {at: makes[0] for at, makes in self._lone_makes() if at in self.common}

    @cached_property
    def skipped_at_once(self) -> dict[int, int]:
        """Values of events whose result is a single tensor and that change nothing: such an event is skipped by
        returning its stand-in."""
        events = self.events
        return {
            at: makes[0]
            for at, makes in self._lone_makes()
            if not (events[at].free or events[at].changes or events[at].additions or events[at].talks)
        }

    def _lone_makes(self) -> list[tuple[int, tuple[int, ...]]]:
        every = zip(self.events, self.results, strict=True)
        return [(at, e.makes) for at, (e, r) in enumerate(every) if type(r) is torch.Tensor and len(e.makes) == 1]

    @cached_property
    def looks_at_tensors(self) -> dict[str, bool]:
        """Getters of tensors that open code uses, and whether they return the same for a stand-in as for the tensor."""
        getters = {name for name in self.quiet if name.endswith(".__get__")}
        return {name: name.split(".")[-2] in _SHAPES for name in getters}

    def before(self, event: int) -> frozenset[int]:
        """Return the values computed before an event that differ between stages."""
        known = self.made_before.get(event)
        if known is None:
            every = enumerate(self.values)
            known = frozenset(number for number, value in every if 0 <= value.made_by < event and not value.free)
            self.made_before[event] = known
        return known

    @cached_property
    def value_names(self) -> dict[int, int]:
        """Values by the names that are equal in all processes."""
        return {value.key: number for number, value in enumerate(self.values)}

    @cached_property
    def event_names(self) -> dict[int, int]:
        """Events by the names that are equal in all processes."""
        return {event.key: at for at, event in enumerate(self.events)}

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """The common properties of forwards that take the same path, independent of sizes."""
        events = [
            (e.name, e.reads, e.makes, e.changes, e.free, e.loose, e.talks, e.region is None, e.additions)
            for e in self.events
        ]
        values = [(value.made_by, value.free, value.grad, value.asked) for value in self.values]
        return (tuple(events), tuple(values), self.returned, self.rolls)

    def parameters(self) -> dict[str, list[int]]:
        """Return the events that use each parameter."""
        users: dict[str, list[int]] = {}
        for at, event in enumerate(self.events):
            for name in event.parameters:
                users.setdefault(name, []).append(at)
        return users


_SHAPES = frozenset(("shape", "dtype", "ndim", "itemsize", "nbytes", "layout"))
DATA = frozenset(
    f"__{name}__" for name in ("array", "bool", "int", "float", "complex", "index", "contains")
) | frozenset(("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"))
HOOKS = frozenset(("register_hook", "retain_grad", "register_post_accumulate_grad_hook"))


def is_fixed(values: Sequence[Value], looked_at: Sequence[int | None]) -> bool:
    """Whether data that open code read is equal for all inputs of the same sizes; None stands for a tensor that is not
    in the trace."""
    return bool(looked_at) and all(value is not None and values[value].fixed for value in looked_at)


def answer(result: Any) -> Any:
    """Return data that open code read in a comparable form; unusual types are equal to nothing."""
    return result if isinstance(result, (bool, int, float, complex, list)) else object()


def hollow(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and type without memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def standing_for(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return a placeholder for a parameter in a result, marked with its name: each process has its own parameters."""
    empty = hollow(parameter)
    empty.parameter = name  # type: ignore[attr-defined]
    return empty


def stands_for(tensor: torch.Tensor) -> str | None:
    return getattr(tensor, "parameter", None)
