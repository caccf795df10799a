"""The asynchronous methods' published numbers, read off the actions; and a loop's unrolling against a plain list."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.action import Action, Op
from penstock.core.loop import Loop
from penstock.core.lower import lower
from penstock.core.schedule import Schedule
from penstock.errors import InputError
from penstock.schedules.registry import loop, schedule

Lines = list[list[Action]]


def lines_of(whole: Schedule) -> Lines:
    return [list(whole.actions(slot)) for slot in range(whole.shape.slots)]


def versions(whole: Schedule, op: Op) -> dict[tuple[int, int], int]:
    """The version that each (stage, micro-batch) names."""
    return {(a.stage, a.microbatch): a.version for line in lines_of(whole) for a in line if a.op is op}


def forwards_ahead(line: list[Action]) -> int:
    """Forwards before the forward that directly precedes the first backward."""
    return [a.op for a in line].index(Op.B) - 1


@pytest.mark.parametrize(("replicas", "warm"), [((3, 1), [1, 0]), ((1, 1, 1, 1), [3, 2, 1, 0]), ((2, 1, 1), [1, 1, 0])])
def test_pipedream_warm_up(replicas: tuple[int, ...], warm: list[int]) -> None:
    whole = schedule("pipedream", stages=len(replicas), replicas=replicas, batches=20)
    ahead = [forwards_ahead(line) for line in lines_of(whole)]
    assert ahead == [w for w, r in zip(warm, replicas, strict=True) for _ in range(r)]


def test_pipedream_1_2_1_with_three_micro_batches_moves() -> None:
    """With leads of 3, 1 and 0 micro-batches the middle replicas waited for one another, and for ever.

    The second replica's first micro-batch is number 3, and the first stage ran only three ahead. Where replicas take
    whole mini-batches in turns, the lead is counted in those.
    """
    whole = schedule("pipedream", stages=3, microbatches=3, replicas=(1, 2, 1), batches=6)
    assert [forwards_ahead(line) for line in lines_of(whole)] == [9, 3, 3, 0]


def test_pipedream_stashing_three_stages() -> None:
    """
    rank 0   F0 F1 F2 B0 F3@1 B1 F4@2 B2 B3@1 B4@2
    rank 1   F0 F1 B0 F2@1 B1 F3@2 B2@1 F4@3 B3@2 B4@3
    rank 2   F0 B0 F1@1 B1@1 F2@2 B2@2 F3@3 B3@3 F4@4 B4@4
    """
    assert str(schedule("pipedream", stages=3, batches=5)).splitlines() == [
        "0F0,0F1,0F2,0B0,0F3@1,0B1,0F4@2,0B2,0B3@1,0B4@2",
        "1F0,1F1,1B0,1F2@1,1B1,1F3@2,1B2@1,1F4@3,1B3@2,1B4@3",
        "2F0,2B0,2F1@1,2B1@1,2F2@2,2B2@2,2F3@3,2B3@3,2F4@4,2B4@4",
    ]


@pytest.mark.parametrize("n", [1, 2, 4, 6])
def test_pipedream_stashing_versions(n: int) -> None:
    """Mini-batch k uses max(0, k - warm-up) on each stage, forward and backward."""
    whole = schedule("pipedream", stages=n, batches=15)
    rule = {(s, k): max(0, k - (n - 1 - s)) for s in range(n) for k in range(15)}
    assert versions(whole, Op.F) == versions(whole, Op.B) == rule


@pytest.mark.parametrize("n", [1, 2, 4, 6])
def test_pipedream_vertical_sync_versions(n: int) -> None:
    """Every stage uses what the input stage had: max(0, k - (n - 1))."""
    whole = schedule("pipedream", stages=n, batches=15, vertical_sync=True)
    rule = {(s, k): max(0, k - (n - 1)) for s in range(n) for k in range(15)}
    assert versions(whole, Op.F) == versions(whole, Op.B) == rule


@pytest.mark.parametrize(
    ("replicas", "warm"), [((3, 1), [1, 0]), ((2, 1, 1), [1, 1, 0]), ((1, 2), [2, 0]), ((4, 2, 1), [1, 1, 0])]
)
def test_pipedream_replicas_versions(replicas: tuple[int, ...], warm: list[int]) -> None:
    """Mini-batch k uses max(0, floor(k / r) - warm-up) and runs on replica k mod r; jr .. jr+r-1 make version j + 1."""
    batches = 17
    whole = schedule("pipedream", stages=len(replicas), replicas=replicas, batches=batches)
    rule = {(s, k): max(0, k // r - warm[s]) for s, r in enumerate(replicas) for k in range(batches)}
    assert versions(whole, Op.F) == versions(whole, Op.B) == rule
    seats = [(s, replica) for s, r in enumerate(replicas) for replica in range(r)]
    for (s, replica), line in zip(seats, lines_of(whole), strict=True):
        mine = [k for k in range(batches) if k % replicas[s] == replica]
        assert [a.microbatch for a in line if a.op is Op.F] == mine
        assert [a.microbatch for a in line if a.op is Op.B] == mine
    for (s, _), line in zip(seats, lines_of(lower(whole)), strict=True):
        rounds = -(-batches // replicas[s])  # the last one is partial, and every replica takes part in it
        assert [a.version for a in line if a.op is Op.UPDATE] == list(range(1, rounds + 1))
        reduced = [a.version for a in line if a.op is Op.REDUCE]
        assert reduced == (list(range(1, rounds + 1)) if replicas[s] > 1 else [])


def alive(line: list[Action]) -> int:
    """Most versions kept at once: the newest, and every older one that a later action names."""
    most, newest = 1, 0
    for at, action in enumerate(line):
        if action.op is Op.UPDATE:
            newest = action.version
        later = {a.version for a in line[at + 1 :] if a.op in (Op.F, Op.B) and a.version <= newest}
        most = max(most, len(later | {newest}))
    return most


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_versions_kept(n: int) -> None:
    """Stashing keeps warm-up + 1, n on the first stage and 1 on the last; vertical sync n everywhere; 2BW two."""

    def kept(name: str, **more: Any) -> list[int]:
        return [alive(line) for line in lines_of(lower(schedule(name, stages=n, batches=4 * n, **more)))]

    assert kept("pipedream") == [n - s for s in range(n)]
    assert kept("pipedream", vertical_sync=True) == [n] * n
    assert kept("pipedream", stash=False) == [1] * n
    assert kept("pipemare", microbatches=2) == [1] * n
    if n > 1:
        assert kept("2bw", microbatches=n) == [2] * n


@pytest.mark.parametrize(("d", "m"), [(4, 4), (4, 8), (3, 5)])
def test_two_bw_versions(d: int, m: int) -> None:
    """Micro-batch k, from 1, uses max(floor((k - 1) / m) - 1, 0), forward and backward, on every stage."""
    whole = schedule("2bw", stages=d, microbatches=m, batches=5)
    rule = {(s, k - 1): max((k - 1) // m - 1, 0) for s in range(d) for k in range(1, 5 * m + 1)}
    assert versions(whole, Op.F) == versions(whole, Op.B) == rule
    for line in lines_of(lower(whole)):
        gradients = [0]
        for action in line:
            if action.op is Op.B:
                gradients[-1] += 1
            elif action.op is Op.UPDATE:
                assert action.version == len(gradients)
                gradients.append(0)
        assert gradients == [m] * 5 + [0]


def test_two_bw_needs_as_many_micro_batches_as_stages() -> None:
    with pytest.raises(InputError, match="at least its depth of 4 stages"):
        schedule("2bw", stages=4, microbatches=2)


@pytest.mark.parametrize(("p", "n"), [(1, 1), (2, 1), (4, 1), (4, 2), (4, 3), (3, 4), (6, 4)])
def test_pipemare_delays(p: int, n: int) -> None:
    """Counted in updates between a micro-batch's forward and its backward: (P - i) / N on average; backward none."""
    batches = 4 * p
    for s, line in enumerate(lines_of(lower(schedule("pipemare", stages=p, microbatches=n, batches=batches)))):
        updates, at_forward, forward_delay, backward_delay = 0, {}, {}, {}
        for action in line:
            if action.op is Op.UPDATE:
                updates += 1
            elif action.op is Op.F:
                assert action.version == updates
                at_forward[action.microbatch] = updates
            elif action.op is Op.B:
                forward_delay[action.microbatch] = updates - at_forward[action.microbatch]
                backward_delay[action.microbatch] = updates - action.version
        steady = range(p * n, batches * n)
        assert Fraction(sum(forward_delay[k] for k in steady), len(steady)) == Fraction(p - (s + 1), n)
        assert not any(backward_delay.values())


# A loop, unrolled, against the list that follows from the rules without any loop.


def plain(name: str, p: int, m: int, replicas: tuple[int, ...], batches: int, **options: bool) -> list[list[str]]:
    """The words of each slot: `ahead` forwards, then a forward and a backward in turns; versions count updates."""
    turns, vertical = name == "pipedream", options.get("vertical_sync", False)
    stash = turns and options.get("stash", True)
    first: dict[int, int] = {}  # version that the first stage used
    lines = []
    for s in range(p):
        for replica in range(replicas[s]):
            mine = [k for k in range(batches * m) if not turns or k // m % replicas[s] == replica]
            ahead = p - 1 - s
            if turns:
                ahead = (sum(replicas[s:]) - 1) // replicas[s] * (m if max(replicas) > 1 else 1)
            line, done, used = [], 0, {}
            for t in range(len(mine) + ahead):
                if t < len(mine):
                    k = mine[t]
                    used[k] = max(k // m - 1, 0) if name == "2bw" else done // m
                    if s == 0:
                        first[k] = used[k]
                    if vertical:
                        used[k] = first[k] * replicas[0] // replicas[s]
                    line.append(Action(Op.F, s, k, used[k]))
                if t >= ahead:
                    k = mine[t - ahead]
                    line.append(Action(Op.B, s, k, used[k] if stash or name == "2bw" else done // m))
                    done += 1
            lines.append([str(action) for action in line])
    return lines


Asked = tuple[str, int, int, tuple[int, ...], dict[str, bool]]


@st.composite
def endless(draw: st.DrawFn) -> Asked:
    name = draw(st.sampled_from(["pipedream", "2bw", "pipemare"]))
    p = draw(st.integers(1, 5))
    m = draw(st.integers(1, 4)) + (p if name == "2bw" else 0)
    replicas = tuple(draw(st.lists(st.integers(1, 3), min_size=p, max_size=p)))
    kinds = [{}, {"vertical_sync": True}, {"stash": False}] if name == "pipedream" else [{}]
    return name, p, m, replicas, draw(st.sampled_from(kinds))


def looped(asked: Asked) -> Loop:
    name, p, m, replicas, options = asked
    return loop(name, stages=p, microbatches=m, replicas=replicas, **options)


@given(endless(), st.integers(1, 25))
@settings(max_examples=300, deadline=None)
def test_unroll_is_the_plain_list(asked: Asked, n: int) -> None:
    name, p, m, replicas, options = asked
    assert looped(asked).unroll(n).words() == plain(name, p, m, replicas, n, **options)


@given(endless(), st.integers(1, 25))
@settings(max_examples=300, deadline=None)
def test_fill_bodies_and_drain_make_the_whole(asked: Asked, n: int) -> None:
    """Fill, then q passes of the body, then the drain: q the same on every slot, and none of them cut.

    A run shorter than the fill cuts the fill: then the drain follows what is left of it.
    """
    endless_loop = looped(asked)
    whole, total = endless_loop.unroll(n), n * asked[2]
    passes = set()
    for slot, drain in enumerate(endless_loop.drain(n)):
        rows = whole.rows.take(slice(int(whole.starts[slot]), int(whole.starts[slot + 1])))
        fill, body = endless_loop.fill[slot], endless_loop.body[slot]
        fill = fill.take(fill.microbatch < total)
        q, rest = divmod(len(rows) - len(fill) - len(drain), len(body))
        assert rest == 0
        passes.add(q)
        steps = np.repeat(np.arange(q), len(body))
        number = np.concatenate([fill.microbatch, np.tile(body.microbatch, q), drain.microbatch])
        number[len(fill) : len(fill) + q * len(body)] += (steps * endless_loop.period * asked[2]).astype(np.int32)
        version = np.concatenate([fill.version, np.tile(body.version, q), drain.version])
        grown = endless_loop.version_step()[np.tile(body.stage, q)] * steps
        version[len(fill) : len(fill) + q * len(body)] += grown.astype(np.int32)
        assert np.array_equal(np.concatenate([fill.op, np.tile(body.op, q), drain.op]), rows.op)
        assert np.array_equal(number, rows.microbatch)
        assert np.array_equal(np.maximum(version, 0), rows.version)
    assert len(passes) == 1


def test_a_run_shorter_than_the_fill() -> None:
    """The drain of a run of one: rank 0 of 4 would fill three forwards, has one, and must run its backward."""
    drains = loop("pipedream", stages=4).drain(1)
    assert [[Op(op) for op in rows.op.tolist()] for rows in drains] == [[Op.B], [Op.B], [Op.B], [Op.F, Op.B]]


def test_no_run_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="batches to be a whole number of at least 1"):
        loop("pipedream", stages=2).unroll(0)
