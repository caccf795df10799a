"""The reasons that forbid a cut before an event: operations of open code across it that two stages cannot do
together."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import SplitError
from penstock.model.trace import Event, Note, Trace


def refusal(seen: Trace, cut: int) -> SplitError | None:
    """Return why the model cannot be cut before an event, or None. `cut` is a position in this trace."""
    return next(_reasons(seen, cut), None)


def _reasons(seen: Trace, cut: int) -> Iterator[SplitError]:
    where = f"before {seen.events[cut].name!r}"
    for note in seen.looks:
        if _made(seen, note) < cut:
            yield SplitError(
                f"no decision across a cut ({where}) that depends on data",
                f"{note.what}() at {note.line} of a value that an earlier stage makes",
                "keep the decision inside one block, or cut elsewhere",
            )
    for note in seen.sides:
        if _made(seen, note) < cut <= note.at:
            yield SplitError(
                f"what goes across a cut ({where}) to travel through calls and results",
                f"{note.what} kept on the side by {seen.events[_made(seen, note)].name!r} and read at {note.line}",
                "return it from the module that makes it and pass it on",
            )
    for note in seen.hooks:
        if _made(seen, note) < 0 or _made(seen, note) < cut < note.at:
            yield SplitError(
                f"a hook on a tensor to be put by the stage that makes it ({where})",
                f"{note.what}() at {note.line}",
                "put the hook right after the call that makes the tensor, or cut elsewhere",
            )
    if cut and seen.events[cut].region is not None and seen.events[cut].region == seen.events[cut - 1].region:
        yield SplitError(
            f"no cut inside a checkpointed region ({where})",
            f"one at {seen.events[cut].line}",
            "cut at its ends, or checkpoint smaller pieces",
        )
    for name, first, last in _changed_buffers(seen):
        if first < cut <= last:
            yield SplitError(
                f"a buffer that the forward changes to be used by one stage alone ({where})",
                f"{name!r}, used at {seen.events[first].line} and at {seen.events[last].line}",
                "cut elsewhere, or keep it inside one block",
            )
    for event in _shared_views(seen, cut):
        yield SplitError(
            f"no cut between a view and its change in place ({where})",
            f"{event.name} at {event.line}, which changes memory that two tensors share",
            "cut elsewhere, or change a copy",
        )


def _made(seen: Trace, note: Note) -> int:
    return seen.values[note.value].made_by


def _changed_buffers(seen: Trace) -> Iterator[tuple[str, int, int]]:
    users: dict[str, list[int]] = {}
    for at, event in enumerate(seen.events):
        for name in event.buffers:
            users.setdefault(name, []).append(at)
    for name, events in users.items():
        yield name, events[0], events[-1]


def _shared_views(seen: Trace, cut: int) -> Iterator[Event]:
    """Yield events behind a cut that change memory which two tensors from before the cut share and code behind it uses.

    The two would be received separately, and only one of them changed. A single one is copied, and its views are made
    of the copy.
    """
    for event in seen.events[cut:]:
        if sum(_in_use(seen, before, after, cut) for before, after in event.changes) > 1:
            yield event


def _in_use(seen: Trace, before: int, after: int, cut: int) -> bool:
    held = seen.values[before]
    crosses = 0 <= held.made_by < cut and not held.free
    return crosses and (max(held.read_by, default=-1) >= cut or bool(seen.values[after].read_by))


def refuse_shared_inputs(seen: Trace, memory: list[int]) -> None:
    """Refuse inputs that share memory with one that is changed in place, which each stage copies. `memory` holds the
    inputs' addresses."""
    for value in seen.inputs:
        if memory[value] and memory.count(memory[value]) > 1:
            event = next(event for event in seen.events if any(before == value for before, _ in event.changes))
            raise SplitError(
                "an input that the forward changes in place to share no memory with another",
                f"{event.name} at {event.line}",
                "hand in copies, or change a copy",
            )
