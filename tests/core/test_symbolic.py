"""The interpreter itself: what it says of the smallest schedules, and what it refuses."""

from __future__ import annotations

import pytest

from penstock.core.action import Action
from penstock.core.lower import lower
from penstock.core.schedule import Schedule
from penstock.core.shape import Law, Shape
from penstock.schedules.registry import schedule
from symbolic import Broken, Terms, interpret

TWO = Shape("two", Law.SYNC, (0, 1), 1)
FIRST, SECOND = "0F0 0F0>1 0B0<1 0B0 0U@1", "1F0<0 1F0 1B0 1B0>0 1U@1"


def written(shape: Shape, *lines: str) -> Schedule:
    return Schedule.of_slots(shape, [[Action.parse(word) for word in line.split()] for line in lines], lowered=True)


def test_one_micro_batch_by_hand() -> None:
    terms = Terms()
    out = interpret(written(TWO, FIRST, SECOND), terms)
    w0, w1 = terms.of("init", 0), terms.of("init", 1)
    f0 = terms.of("fwd", 0, w0, (terms.of("data", 0, 0),))
    f1 = terms.of("fwd", 1, w1, (f0,))
    loss = (terms.of("loss", 1, 0, 0),)
    back = terms.of("gin", 0, f1, w1, loss)
    assert out.weights[1, 0] == terms.of("update", w1, (terms.of("gw", f1, w1, loss),))
    assert out.weights[0, 0] == terms.of("update", w0, (terms.of("gw", f0, w0, (back,)),))
    assert out.uses == {(letter, s, 0, 0): 0 for letter in "FIW" for s in (0, 1)}


def test_a_backward_in_two_is_the_backward() -> None:
    terms = Terms()
    whole = interpret(written(TWO, FIRST, SECOND), terms)
    assert interpret(written(TWO, FIRST, "1F0<0 1F0 1I0 1B0>0 1W0 1U@1"), terms) == whole


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((FIRST.replace("0F0>1 ", ""), SECOND), "stuck at 0B0<1"),
        ((FIRST, SECOND.replace("1F0<0 ", "")), "lacks the input of 1F0"),
        ((FIRST.replace("0B0<1 ", ""), SECOND), "lacks the gradient for 0B0"),
        ((FIRST, SECOND.replace("1B0 ", "")), "nothing to send"),
        ((FIRST.replace("0U@1", "0U@2"), SECOND), "version 1 is next"),
        ((FIRST.replace(" 0U@1", ""), SECOND), "gradients that no update used"),
        ((FIRST, SECOND.replace("1B0 ", "1I0 ")), "left with halves"),
        ((FIRST, SECOND.replace("1F0 ", "1F0@1 ")), "no version 1"),
        ((FIRST.replace("0F0>1", "0F0>1 0F0>1"), SECOND), "sent a second time"),
        ((FIRST.replace("0F0>1", "0F0>1.1"), SECOND), "no such replica"),
        ((FIRST.replace("0F0 ", "0F0 0F0 "), SECOND), "runs a second time"),
        ((FIRST.replace("0B0 ", "0B0 0F0 "), SECOND), "left with outputs"),
        ((FIRST, "1F0<0 1F0&1B0 1B0>0 1U@1"), "1B0 has no forward"),
    ],
)
def test_refuses(lines: tuple[str, str], said: str) -> None:
    with pytest.raises(Broken, match=said):
        interpret(written(TWO, *lines), Terms())


def test_replicas_that_split_give_the_gradients_of_one() -> None:
    """Grains of the lcm of all replica counts: (2, 3) and (3, 2) are one training; fewer micro-batches are another."""
    terms = Terms()
    one, other, fewer = (
        interpret(lower(schedule(name, stages=2, microbatches=m, replicas=replicas)), terms)
        for name, m, replicas in (("1f1b", 3, (2, 3)), ("gpipe", 3, (3, 2)), ("1f1b", 2, (2, 3)))
    )
    assert len(set(one.weights.values())) == 2  # one expression a stage, the same on its replicas
    assert one.weights[0, 0] == other.weights[0, 2]
    assert one.weights[1, 2] == other.weights[1, 0]
    assert one.weights[0, 0] != fewer.weights[0, 0]


def test_all_synchronous_methods_train_alike() -> None:
    terms = Terms()
    straight = [
        interpret(lower(schedule(name, stages=3, microbatches=6, batches=2)), terms)
        for name in ("naive", "gpipe", "1f1b", "dapple", "zb-h1", "zb-h2")
    ]
    assert all(outcome == straight[0] for outcome in straight)
    six = interpret(lower(schedule("1f1b", stages=6, microbatches=6, batches=2)), terms)
    for name, more in (("interleaved", {"chunks": 2}), ("zb-v", {}), ("dualpipe-v", {"overlap": True})):
        assert interpret(lower(schedule(name, stages=3, microbatches=6, batches=2, **more)), terms) == six


def test_asynchronous_methods_do_not() -> None:
    terms = Terms()
    sync, stash, vertical, newest, two_bw, mare = (
        interpret(lower(schedule(name, stages=3, microbatches=3, batches=4, **more)), terms)
        for name, more in (
            ("1f1b", {}),
            ("pipedream", {}),
            ("pipedream", {"vertical_sync": True}),
            ("pipedream", {"stash": False}),
            ("2bw", {}),
            ("pipemare", {}),
        )
    )
    assert newest == mare  # without replicas these two are one rule
    trainings = [tuple(sorted(outcome.weights.items())) for outcome in (sync, stash, vertical, newest, two_bw)]
    assert len(set(trainings)) == 5
