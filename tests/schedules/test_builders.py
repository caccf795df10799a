"""Every builder, for random pipelines: sound, readable back from its text, and the training that was published."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from asks import NAMES, Ask, asks, build, rule_of, setting_of
from penstock.core.check import check
from penstock.core.lower import lower
from penstock.core.schedule import Schedule
from penstock.errors import InputError
from penstock.schedules.registry import METHODS, schedule
from published import expected
from symbolic import Terms, interpret


@given(asks())
@settings(max_examples=300, deadline=None)
def test_sound_before_and_after_lowering(ask: Ask) -> None:
    built = build(ask)
    assert not built.lowered
    report = check(built)
    assert report.ok, str(report)
    assert report.schedule is built
    report = check(lower(built))
    assert report.ok, str(report)


@given(asks(most_stages=4))
@settings(max_examples=120, deadline=None)
def test_round_trip_and_lowering_twice(ask: Ask) -> None:
    built = build(ask)
    full = lower(built)
    for one in (built, full):
        assert Schedule.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert full.lowered
    assert lower(full) == full
    assert full != built


@given(asks(most_stages=4))
@settings(max_examples=300, deadline=None)
def test_computes_what_was_published(ask: Ask) -> None:
    """The lowered schedule, interpreted without the checker, against the method's rule, written without a schedule."""
    built, terms = build(ask), Terms()
    at = setting_of(ask, built.shape.edges, built.shape.placement)
    assert interpret(lower(built), terms) == expected(at, rule_of(ask), terms)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [1, 2, 3])
def test_one_stage_alone(name: str, m: int) -> None:
    """One rank: nothing to send, and still a forward, a backward and an update for each stage and mini-batch."""
    built = schedule(name, stages=1, microbatches=max(m, 2) if name == "dualpipe-v" else m, batches=2)
    full = lower(built)
    assert check(built).ok
    assert check(full).ok
    words = full.words()[0]
    assert len(full.words()) == 1
    assert not any(sign in word for word in words for sign in "<>")
    assert sum("U" in word for word in words) == 2 * built.shape.stages


U_NET = ((0, 1), (1, 2), (2, 3), (0, 3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_skip_connections_of_a_u_net(name: str, replicas: int) -> None:
    """Besides the chain, stage 0 feeds stage 3. On every placement the tensor arrives, or is there already."""
    folded = METHODS[name].chunks == (2, 2)
    p = 2 if folded or name == "interleaved" else 4
    built = schedule(name, stages=p, microbatches=4, batches=2, edges=U_NET, replicas=replicas)
    assert built.shape.stages == 4
    assert check(built).ok
    words = [word for line in lower(built).words() for word in line]
    apart = built.shape.placement[0] != built.shape.placement[3]
    assert any(word.startswith("0F0>3") for word in words) == apart
    assert any(word.startswith("3B0>0") for word in words) == apart


def test_a_skip_instead_of_the_chain() -> None:
    """Edges alone say who feeds whom: (0, 3) and (1, 2) make two pipelines of two stages that share no data."""
    built = schedule("1f1b", stages=4, microbatches=3, edges=((0, 3), (1, 2)))
    assert check(built).ok
    assert interpret(lower(built), Terms()).uses


def test_an_edge_twice_is_refused() -> None:
    with pytest.raises(InputError, match="each edge once"):
        schedule("1f1b", stages=2, microbatches=2, edges=((0, 1), (0, 1)))


def test_words_of_transfers_are_for_lowered_schedules() -> None:
    """What lowering adds may not stand in its input: it would be added a second time."""
    whole = lower(schedule("1f1b", stages=2, microbatches=2))
    half = Schedule.of_slots(whole.shape, [list(whole.actions(slot)) for slot in range(2)], lowered=False)
    with pytest.raises(InputError, match=r"compute actions alone.*0F0>1.*lowered=True"):
        lower(half)


def test_lines_and_slots_must_agree() -> None:
    data = schedule("1f1b", stages=3, microbatches=2).to_json()
    data["slots"] = data["slots"][:2]
    with pytest.raises(InputError, match="each of 3 slots, but got 2"):
        Schedule.from_json(data)
