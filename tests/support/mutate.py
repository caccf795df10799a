"""Random damage to a schedule: one small change, by name, reproducible from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from random import Random

from penstock.core.action import COMPUTE, TRANSFER, Action, Op
from penstock.core.lower import lower
from penstock.core.schedule import Schedule
from penstock.core.shape import Shape
from penstock.schedules.registry import schedule

Grid = list[list[Action]]

# One line a case: method, and what it is asked for. Every method, sharing and law, one and several mini-batches.
CASES: tuple[tuple[str, dict[str, object]], ...] = (
    ("naive", {"stages": 3, "microbatches": 2, "batches": 2}),
    ("gpipe", {"stages": 3, "microbatches": 3, "batches": 2}),
    ("gpipe", {"stages": 2, "microbatches": 2, "batches": 2, "replicas": (2, 3)}),
    ("1f1b", {"stages": 1, "microbatches": 2, "batches": 2, "replicas": 2}),
    ("1f1b", {"stages": 4, "microbatches": 5}),
    ("1f1b", {"stages": 3, "microbatches": 2, "batches": 2, "replicas": (2, 1, 2)}),
    ("1f1b", {"stages": 4, "microbatches": 3, "edges": ((0, 1), (1, 2), (2, 3), (0, 3))}),
    ("dapple", {"stages": 3, "microbatches": 4, "policy": "pb", "batches": 2}),
    ("dapple", {"stages": 2, "microbatches": 3, "replicas": (3, 1), "cap": 1}),
    ("interleaved", {"stages": 2, "microbatches": 2, "chunks": 2, "batches": 2}),
    ("interleaved", {"stages": 2, "microbatches": 4, "chunks": 3, "replicas": (1, 2)}),
    ("zb-h1", {"stages": 3, "microbatches": 3, "batches": 2}),
    ("zb-h2", {"stages": 3, "microbatches": 4, "replicas": (1, 2, 1)}),
    ("zb-v", {"stages": 2, "microbatches": 3, "batches": 2}),
    ("zb-v", {"stages": 1, "microbatches": 3}),
    ("dualpipe-v", {"stages": 2, "microbatches": 4, "overlap": True, "batches": 2}),
    ("dualpipe-v", {"stages": 2, "microbatches": 5, "overlap": True, "replicas": (2, 1)}),
    ("dualpipe-v", {"stages": 1, "microbatches": 3, "overlap": True}),
    ("pipedream", {"stages": 3, "batches": 5}),
    ("pipedream", {"stages": 3, "microbatches": 2, "batches": 4}),
    ("pipedream", {"stages": 2, "replicas": (3, 1), "batches": 7}),
    ("pipedream", {"stages": 3, "microbatches": 2, "replicas": (2, 1, 1), "batches": 5}),
    ("pipedream", {"stages": 3, "batches": 5, "vertical_sync": True}),
    ("pipedream", {"stages": 3, "replicas": (1, 2, 1), "batches": 6, "vertical_sync": True}),
    ("pipedream", {"stages": 3, "batches": 5, "stash": False}),
    ("2bw", {"stages": 3, "microbatches": 3, "batches": 4}),
    ("2bw", {"stages": 2, "microbatches": 2, "batches": 4, "replicas": (2, 1)}),
    ("pipemare", {"stages": 3, "microbatches": 2, "batches": 4}),
    ("pipemare", {"stages": 2, "microbatches": 2, "batches": 3, "replicas": (1, 2)}),
)


@cache
def case(number: int, lowered: bool) -> Schedule:
    name, asked = CASES[number]
    built = schedule(name, **asked)  # type: ignore[arg-type]
    return lower(built) if lowered else built


def grid_of(whole: Schedule) -> Grid:
    return [list(whole.actions(slot)) for slot in range(whole.shape.slots)]


Places = list[tuple[int, int]]


def _places(grid: Grid, *ops: Op) -> Places:
    return [(s, i) for s, line in enumerate(grid) for i, a in enumerate(line) if not ops or a.op in ops]


def _pick(grid: Grid, rng: Random, *ops: Op) -> tuple[int, int] | None:
    places = _places(grid, *ops)
    return rng.choice(places) if places else None


def _other(now: int, lowest: int, highest: int, rng: Random) -> int:
    return rng.choice([n for n in range(lowest, highest + 1) if n != now])


def drop(grid: Grid, shape: Shape, rng: Random) -> bool:
    slot, at = rng.choice(_places(grid))
    del grid[slot][at]
    return True


def double(grid: Grid, shape: Shape, rng: Random) -> bool:
    slot, at = rng.choice(_places(grid))
    grid[slot].insert(rng.randint(0, len(grid[slot])), grid[slot][at])
    return True


def swap_neighbours(grid: Grid, shape: Shape, rng: Random) -> bool:
    slot, at = rng.choice(_places(grid))
    if at + 1 == len(grid[slot]):
        return False
    grid[slot][at], grid[slot][at + 1] = grid[slot][at + 1], grid[slot][at]
    return True


def swap_any(grid: Grid, shape: Shape, rng: Random) -> bool:
    slot, at = rng.choice(_places(grid))
    to = rng.randrange(len(grid[slot]))
    grid[slot][at], grid[slot][to] = grid[slot][to], grid[slot][at]
    return to != at


def shift(grid: Grid, shape: Shape, rng: Random) -> bool:
    """Move an action a few places in its slot."""
    slot, at = rng.choice(_places(grid))
    to = min(max(at + rng.choice((-4, -3, -2, 2, 3, 4)), 0), len(grid[slot]) - 1)
    grid[slot].insert(to, grid[slot].pop(at))
    return to != at


def move_elsewhere(grid: Grid, shape: Shape, rng: Random) -> bool:
    slot, at = rng.choice(_places(grid))
    to = rng.randrange(len(grid))
    if to == slot:
        return False
    grid[to].insert(rng.randint(0, len(grid[to])), grid[slot].pop(at))
    return True


def _change(field: str) -> Callable[[Grid, Shape, Random], bool]:
    def change(grid: Grid, shape: Shape, rng: Random) -> bool:
        slot, at = rng.choice(_places(grid))
        action = grid[slot][at]
        target = action.joined if action.joined is not None and rng.random() < 0.5 else action
        now = getattr(target, field)
        if now < 0 or (field in ("peer", "replica") and target.op not in TRANSFER):
            return False
        highest = {
            "version": now + 1,
            "microbatch": shape.total,  # one too many
            "stage": shape.stages,
            "peer": shape.stages,
            "replica": max(shape.replicas),
        }[field]
        changed = replace(target, **{field: _other(now, 0, highest, rng)})
        grid[slot][at] = changed if target is action else replace(action, joined=changed)
        return True

    change.__name__ = f"wrong_{field}"
    return change


def backward_in_half(grid: Grid, shape: Shape, rng: Random) -> bool:
    """B becomes I, and its W is forgotten."""
    place = _pick(grid, rng, Op.B)
    if place is None:
        return False
    grid[place[0]][place[1]] = replace(grid[place[0]][place[1]], op=Op.I)
    return True


def backward_in_two(grid: Grid, shape: Shape, rng: Random) -> bool:
    """B becomes I, and its W comes later: often right."""
    place = _pick(grid, rng, Op.B)
    if place is None:
        return False
    slot, at = place
    action = grid[slot][at]
    grid[slot][at] = replace(action, op=Op.I)
    grid[slot].insert(rng.randint(at + 1, min(at + 4, len(grid[slot]))), replace(action, op=Op.W))
    return True


def wrong_op(grid: Grid, shape: Shape, rng: Random) -> bool:
    slot, at = rng.choice(_places(grid))
    action = grid[slot][at]
    if action.op in COMPUTE:
        ops = [Op.F, Op.B, Op.I, Op.W]
    elif action.op in TRANSFER:
        ops = list(TRANSFER)
    else:
        ops = [Op.REDUCE, Op.UPDATE]
    grid[slot][at] = replace(action, op=rng.choice([op for op in ops if op is not action.op]), joined=None)
    return True


def join(grid: Grid, shape: Shape, rng: Random) -> bool:
    """A forward and the backward behind it become one overlapped action."""
    places = [
        (s, i)
        for s, line in enumerate(grid)
        for i in range(len(line) - 1)
        if line[i].op is Op.F and line[i + 1].op is Op.B
    ]
    if not places:
        return False
    slot, at = rng.choice(places)
    grid[slot][at] = replace(grid[slot][at], op=Op.FB, joined=grid[slot].pop(at + 1))
    return True


def part(grid: Grid, shape: Shape, rng: Random) -> bool:
    """An overlapped pair becomes two actions, in either order, or loses its backward."""
    place = _pick(grid, rng, Op.FB)
    if place is None:
        return False
    slot, at = place
    pair = grid[slot][at]
    assert pair.joined is not None
    forward = replace(pair, op=Op.F, joined=None)
    lonely = replace(pair, joined=None)
    grid[slot][at : at + 1] = rng.choice([[forward, pair.joined], [pair.joined, forward], [lonely]])
    return True


MUTATIONS = (
    *(drop, double, swap_neighbours, swap_any, shift, move_elsewhere),
    *(_change(field) for field in ("version", "microbatch", "stage", "peer", "replica")),
    *(backward_in_half, backward_in_two, wrong_op, join, part),
)


def mutants(seed: int, count: int, times: int = 1) -> Iterator[tuple[int, str, Schedule, Schedule]]:
    """`count` mutants as (case, mutation, original, mutant); `times` mutations each."""
    rng = Random(seed)
    made = 0
    while made < count:
        number, lowered = rng.randrange(len(CASES)), rng.random() < 0.5
        original = case(number, lowered)
        grid = grid_of(original)
        names = []
        for _ in range(times):
            mutation = rng.choice(MUTATIONS)
            if mutation(grid, original.shape, rng):
                names.append(mutation.__name__)
        mutant = Schedule.of_slots(original.shape, grid, lowered)
        if len(names) == times and mutant != original:
            made += 1
            yield number, "+".join(names), original, mutant
