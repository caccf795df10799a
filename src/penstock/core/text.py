"""Schedules as CSV text: one line per slot, words separated by commas, and a head for everything else.

    # name: pipedream
    # law: stash
    # microbatches: 1
    # batches: 4
    0F0,0F1,0B0,0F2@1,0B1,0F3@2,0B2@1,0B3@2
    1F0,1B0,1F1@1,1B1@1,1F2@2,1B2@2,1F3@3,1B3@3

A file without a head is one synchronous mini-batch; its words give stages, ranks and micro-batches. An empty cell is
idle time and is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from penstock.core.action import COMPUTE, Action
from penstock.core.arguments import named
from penstock.core.schedule import Schedule, require_schedule
from penstock.core.shape import Law, Shape, Sharing
from penstock.errors import FormatError, InputError

Choice = TypeVar("Choice", Law, Sharing)

_KEYS = ("name", "law", "placement", "microbatches", "batches", "replicas", "sharing", "edges", "lowered")


@named
def to_csv(schedule: Schedule) -> str:
    """Return the text of a schedule, with a head that omits default values."""
    require_schedule(schedule)
    shape = schedule.shape
    default = Shape(shape.name, shape.law, tuple(range(shape.stages)), shape.microbatches)
    head = {"name": shape.name, "law": shape.law.value}
    if shape.placement != default.placement:
        head["placement"] = ",".join(map(str, shape.placement))
    head |= {"microbatches": str(shape.microbatches), "batches": str(shape.batches)}
    if max(shape.replicas) > 1:
        head |= {"replicas": ",".join(map(str, shape.replicas)), "sharing": shape.sharing.value}
    elif shape.turns:
        head["sharing"] = shape.sharing.value
    if shape.edges != default.edges:
        head["edges"] = ",".join(f"{a}-{b}" for a, b in shape.edges)
    if schedule.lowered:
        head["lowered"] = "yes"
    return "".join(f"# {key}: {value}\n" for key, value in head.items()) + "".join(
        f"{','.join(words) or ','}\n"
        for words in schedule.words()  # an idle slot has a line too
    )


@dataclass
class _Sheet:
    """The content of a file: its head, and the actions of each slot with their line number."""

    where: str
    head: dict[str, tuple[str, int]] = field(default_factory=dict)
    slots: list[list[Action]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


@named
def from_csv(text: str, where: str = "schedule") -> Schedule:
    """Return the schedule of a text, the inverse of `to_csv`. `where` names the source in error messages."""
    require_text(text, where)
    sheet = _read(text, where)
    if not any(sheet.slots):
        raise FormatError(where, "at least one line of actions", "none", "write one line a rank, like 0F0,0B0")
    lowered = _one_of(sheet, "lowered", ("no", "yes")) == "yes"
    lowered = lowered or any(a.op not in COMPUTE for slot in sheet.slots for a in slot)
    shape = _shape(sheet)
    if len(sheet.slots) != shape.slots:
        raise FormatError(
            where,
            f"{shape.slots} lines of actions, one a slot",
            len(sheet.slots),
            "add or drop lines, or correct the head",
        )
    return Schedule.of_slots(shape, sheet.slots, lowered)


def require_text(text: object, where: str) -> None:
    """Refuse what is no text, and the path of a file in place of what is in it."""
    path = isinstance(text, str) and text.endswith(".csv") and "\n" not in text
    if not isinstance(text, str) or path:
        came = repr(text) if path else f"{type(text).__name__} {text!s:.50}"
        raise FormatError(where, "the text of a schedule", came, "read a file first: Path(file).read_text()")


def _read(text: str, where: str) -> _Sheet:
    sheet = _Sheet(where)
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip().lstrip("\ufeff")
        if line.startswith("#"):
            key, colon, value = line[1:].partition(":")
            if colon and key.strip() in sheet.head:
                raise FormatError(f"{where}, line {number}", "each key once", repr(key.strip()), "drop one of the two")
            if colon and key.strip() in _KEYS:
                sheet.head[key.strip()] = (value.strip(), number)
            elif colon and " " not in key.strip():
                raise FormatError(
                    f"{where}, line {number}", f"a key among {', '.join(_KEYS)}", repr(key.strip()), "correct the key"
                )
        elif line:
            cells = [(column, cell.strip()) for column, cell in enumerate(line.split(","), 1)]
            sheet.slots.append(
                [Action.parse(cell, f"{where}, line {number}, cell {column}") for column, cell in cells if cell]
            )
            sheet.lines.append(number)
    return sheet


def _value(sheet: _Sheet, key: str, default: str) -> str:
    return sheet.head.get(key, (default, 0))[0]


def _numbers(sheet: _Sheet, key: str) -> tuple[int, ...]:
    text, line = sheet.head.get(key, ("", 0))
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise FormatError(
            f"{sheet.where}, line {line}", f"whole numbers for {key!r}", repr(text), "write them like 1,2,3"
        ) from None


def _number(sheet: _Sheet, key: str, default: int) -> int:
    values = _numbers(sheet, key) or (default,)
    if len(values) > 1:
        raise FormatError(f"{sheet.where}, line {sheet.head[key][1]}", f"one number for {key!r}", values, "keep one")
    return values[0]


def _one_of(sheet: _Sheet, key: str, choices: tuple[str, ...]) -> str:
    text, line = sheet.head.get(key, (choices[0], 0))
    if text not in choices:
        raise FormatError(
            f"{sheet.where}, line {line}", f"{key} to be {' or '.join(choices)}", repr(text), "choose one"
        )
    return text


def _shape(sheet: _Sheet) -> Shape:
    replicas = _numbers(sheet, "replicas")
    total = max((_most_microbatch(a) for slot in sheet.slots for a in slot), default=0) + 1
    batches = _number(sheet, "batches", 1)
    microbatches = _number(sheet, "microbatches", -(-total // max(batches, 1)))
    edges = tuple(_edge(sheet, part) for part in _value(sheet, "edges", "").split(",") if part)
    try:
        return Shape(
            name=_value(sheet, "name", "custom"),
            law=_law(sheet),
            placement=_numbers(sheet, "placement") or _placement(sheet, replicas),
            microbatches=microbatches,
            batches=batches,
            replicas=replicas,
            sharing=_choice(sheet, "sharing", Sharing, Sharing.SPLIT.value),
            edges=edges,
        )
    except FormatError:
        raise
    except InputError as error:
        raise FormatError(sheet.where, error.expected, error.came, error.do) from None


def _most_microbatch(action: Action) -> int:
    return action.microbatch if action.joined is None else max(action.microbatch, action.joined.microbatch)


def _choice(sheet: _Sheet, key: str, kind: type[Choice], default: str) -> Choice:
    text = _value(sheet, key, default)
    try:
        return kind(text)
    except ValueError:
        names = ", ".join(member.value for member in kind)
        line = sheet.head[key][1]
        raise FormatError(
            f"{sheet.where}, line {line}", f"{key} to be one of {names}", repr(text), "choose one"
        ) from None


def _law(sheet: _Sheet) -> Law:
    law = _choice(sheet, "law", Law, Law.SYNC.value)
    names_versions = any(a.version and a.op in COMPUTE for slot in sheet.slots for a in slot)
    if "law" not in sheet.head and names_versions and "batches" not in sheet.head:
        raise FormatError(
            sheet.where, "a law where actions name weight versions", "no head", "add a line like '# law: stash'"
        )
    return law


def _edge(sheet: _Sheet, part: str) -> tuple[int, int]:
    a, dash, b = part.strip().partition("-")
    if not (dash and a.isdecimal() and b.isdecimal()):
        line = sheet.head["edges"][1]
        raise FormatError(f"{sheet.where}, line {line}", "edges like 0-1,1-2", repr(part), "correct the edge")
    return int(a), int(b)


def _placement(sheet: _Sheet, replicas: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rank of every stage: the one whose lines have most of its actions."""
    rank_of_line = [rank for rank, count in enumerate(replicas) for _ in range(count)] or list(range(len(sheet.slots)))
    counts: dict[int, dict[int, int]] = {}
    for line, slot in enumerate(sheet.slots):
        for action in slot:
            for part in (action, action.joined):
                if part is not None and part.op in COMPUTE:
                    by_rank = counts.setdefault(part.stage, {})
                    rank = rank_of_line[line] if line < len(rank_of_line) else line
                    by_rank[rank] = by_rank.get(rank, 0) + 1
    stages = max(counts, default=0) + 1
    missing = next((stage for stage in range(stages) if stage not in counts), None)
    if missing is not None:
        raise FormatError(
            sheet.where, f"actions of every stage from 0 to {stages - 1}", f"none of stage {missing}", "add them"
        )
    # The majority decides, so that a single word on the wrong line is a fault that `check` reports.
    return tuple(max(counts[stage], key=counts[stage].__getitem__) for stage in range(stages))
