"""One forward of the whole model, written down: which event made, read and changed which value.

Values are numbered. A tensor that an event changes in place becomes a new value, made by that event, and so do all
that share its memory. Inputs of the model, its buffers, and what glue computes from them alone are *free*: every stage
has the inputs, so every stage computes them again; nothing of that is sent.
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
    """One atom call or glue function."""

    name: str
    atom: bool
    line: str
    reads: tuple[int, ...]  # values
    makes: tuple[int, ...]  # one for each tensor in its result; an alias of an input keeps that input's number
    changes: tuple[tuple[int, int], ...]  # (value before, value after) of tensors changed in place
    parameters: tuple[str, ...]  # used anywhere inside
    buffers: tuple[str, ...]  # the same; only those that the forward changes
    free: bool
    flops: float = 0.0
    mark: int = 0  # the same for two that ran the same operators in the same order, on the same shapes and numbers
    loose: bool = False  # reads a tensor that is no event's result: a constant, or one kept on the side
    talks: bool = False  # its result holds more than tensors and None
    region: int | None = None  # the user's checkpoint it is called in
    alike: int = 0  # the same for events that are called and given the same, in every process
    key: int = 0  # its own name in every process: see naming
    places: tuple[str, ...] = ()  # of what it reads, in its arguments
    seed: int | None = None  # of random numbers that depend on nothing but the inputs: every stage draws the same
    additions: tuple[Addition, ...] = ()  # to containers it was given; their values stand behind its result


@dataclass
class Value:
    """What is known of one value from the example."""

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
    """Something that open code did with a value between events, which only some cuts allow."""

    what: str
    value: int
    at: int  # the next event
    line: str


class StandIn(NamedTuple):
    """A tensor in place of one that an earlier stage made."""

    told: tuple[tuple[int, ...], torch.dtype] | None  # what that stage has said of it; None: it is as on the trace
    tensor: torch.Tensor


@dataclass
class Trace:
    """All events of one forward, and what else must be known to cut it."""

    events: list[Event]
    values: list[Value]
    returned: tuple[int, ...]  # the values in its result
    quiet: frozenset[str]  # functions that only looked
    results: list[Any]  # of every event, with empty tensors in it
    hooks: tuple[Note, ...] = ()  # tensor hooks
    looks: tuple[Note, ...] = ()  # at data that an event made: decisions
    sides: tuple[Note, ...] = ()  # tensors that an event read though they were not handed to it
    buffers: tuple[tuple[str, int], ...] = ()  # those that open code reads, and their values
    inputs: frozenset[int] = frozenset()  # inputs that the forward changes in place
    withheld: frozenset[type] = frozenset()  # objects in the result that hold what several stages made
    answers: tuple[Any, ...] = ()  # of looks at data, unless it is fixed: inputs of one kind may take different paths
    decided: int = 0  # the event before which the last of them was given
    rolls: bool = False  # open code draws from Python's or NumPy's random numbers, and may decide by them
    chance: int = 0  # what the random numbers of open code depended on
    generators: tuple[Any, ...] = ()  # that the forward draws from and no module holds
    written: dict[str, str] = field(default_factory=dict)  # weights it changes, and where; "" where often is as once
    kept: dict[tuple[str, str], int] = field(default_factory=dict)  # module, attribute -> the event that sets it
    result: Any = None  # of the forward, with empty tensors in it
    stand_ins: dict[int, StandIn] = field(default_factory=dict)  # by value; they hold nothing, so they are shared
    made_before: dict[int, frozenset[int]] = field(default_factory=dict)  # see `before`

    @property
    def asks(self) -> bool:
        """Whether open code looked at the shape or type of something that is not the same on every stage."""
        return any(value.asked and value.made_by >= 0 and not value.free for value in self.values)

    @property
    def decides(self) -> bool:
        """Whether inputs of one kind may take different paths."""
        return bool(self.answers) or self.rolls

    @property
    def may_drop(self) -> bool:
        """Whether open code may leave modules out by chance."""
        return self.rolls or bool(self.answers and self.draws)

    @property
    def draws(self) -> bool:
        """Whether open code draws random numbers."""
        return self.rolls or any(event.seed is not None for event in self.events)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What is called at each event, and nothing at the end."""
        return (*(event.name for event in self.events), "")

    @cached_property
    def common(self) -> frozenset[int]:
        """Events of which stages in one process may share a result: it is the same for all, and nobody changes it."""
        changed = {before for event in self.events for before, _ in event.changes}
        return frozenset(
            at
            for at, event in enumerate(self.events)
            if event.free and not event.changes and event.region is None and not changed & {*event.makes, *event.reads}
        )

    @cached_property
    def fixed(self) -> frozenset[int]:
        """Those of them whose results are the same for all inputs of the same sizes."""
        events, values = self.events, self.values
        return frozenset(
            at for at in self.common if events[at].makes and all(values[v].fixed for v in events[at].makes)
        )

    @cached_property
    def lone(self) -> dict[int, int]:
        """The values of common events that make one tensor and nothing else."""
        return {at: makes[0] for at, makes in self._lone_makes() if at in self.common}

    @cached_property
    def skipped_at_once(self) -> dict[int, int]:
        """The values of events that make one tensor and nothing else, and change nothing: to skip one, only its
        stand-in is needed."""
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
        """Getters of tensors that open code uses, and whether one that needs no data says of a stand-in what it says
        of the tensor."""
        getters = {name for name in self.quiet if name.endswith(".__get__")}
        return {name: name.split(".")[-2] in _SHAPES for name in getters}

    def before(self, event: int) -> frozenset[int]:
        """Values made before an event that are not the same on every stage."""
        known = self.made_before.get(event)
        if known is None:
            every = enumerate(self.values)
            known = frozenset(number for number, value in every if 0 <= value.made_by < event and not value.free)
            self.made_before[event] = known
        return known

    @cached_property
    def value_names(self) -> dict[int, int]:
        """The values by the names that all processes know them by."""
        return {value.key: number for number, value in enumerate(self.values)}

    @cached_property
    def event_names(self) -> dict[int, int]:
        """The events by theirs."""
        return {event.key: at for at, event in enumerate(self.events)}

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """What two forwards have in common that take the same path, whatever their sizes."""
        events = [
            (e.name, e.reads, e.makes, e.changes, e.free, e.loose, e.talks, e.region is None, e.additions)
            for e in self.events
        ]
        values = [(value.made_by, value.free, value.grad, value.asked) for value in self.values]
        return (tuple(events), tuple(values), self.returned, self.rolls)

    def parameters(self) -> dict[str, list[int]]:
        """The events that use each parameter."""
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
    """Whether a look at data has the same answer for all inputs of the same sizes; None stands for a tensor that is no
    value of the trace."""
    return bool(looked_at) and all(value is not None and values[value].fixed for value in looked_at)


def answer(result: Any) -> Any:
    """What a look at data said, in a form that can be compared; anything unusual is like nothing else."""
    return result if isinstance(result, (bool, int, float, complex, list)) else object()


def hollow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and type that holds nothing."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def standing_for(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """In a result that holds a parameter as it is, what says which: another process has that parameter's memory."""
    empty = hollow(parameter)
    empty.parameter = name  # type: ignore[attr-defined]
    return empty


def stands_for(tensor: torch.Tensor) -> str | None:
    return getattr(tensor, "parameter", None)
