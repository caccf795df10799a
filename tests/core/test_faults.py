"""Each kind of fault, put where we know it: the report names the slot, the place in its line and the action.

The schedule that is damaged (1F1B, 2 ranks, 2 micro-batches), as lowered; a case replaces the words of one slot from
one place on:

    cell     0   1     2     3     4     5     6     7     8
    rank 0   0F0 0F0>1 0F1   0F1>1 0B0<1 0B0   0B1<1 0B1   0U@1
    rank 1   1F0<0 1F0 1B0   1B0>0 1F1<0 1F1   1B1   1B1>0 1U@1
"""

from __future__ import annotations

import pytest

from penstock.core.action import Action, Op
from penstock.core.check import check, prove
from penstock.core.faults import Fault, FaultKind, Report
from penstock.core.lower import lower
from penstock.core.schedule import Schedule
from penstock.core.shape import Law, Shape, Sharing
from penstock.errors import ScheduleError
from penstock.schedules.registry import schedule

TWO = Shape("two", Law.SYNC, (0, 1), 2)
LINES = (
    "0F0 0F0>1 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1 0U@1",
    "1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1 1B1>0 1U@1",
)


def written(shape: Shape, *lines: str, lowered: bool = True) -> Schedule:
    return Schedule.of_slots(shape, [[Action.parse(word) for word in line.split()] for line in lines], lowered)


def places(report: Report) -> set[tuple[FaultKind, int, int]]:
    return {(fault.kind, fault.slot, fault.cell) for fault in report.faults}


def the_fault(report: Report, kind: FaultKind, slot: int, cell: int) -> Fault:
    found = [f for f in report.faults if (f.kind, f.slot, f.cell) == (kind, slot, cell)]
    assert len(found) == 1, str(report)
    return found[0]


def test_the_undamaged_is_what_lowering_makes() -> None:
    assert lower(schedule("1f1b", stages=2, microbatches=2)).words() == [line.split() for line in LINES]
    assert check(written(TWO, *LINES)).ok


K = FaultKind
DAMAGE = [
    # slot, its line after the damage, and the fault: kind, slot, cell, what it says
    (0, "0F0 0F0>1 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1 0U@1 7F0", (K.STRAY, 0, 9, "7F0: there is no such stage")),
    (0, "0F0 0F0>1 0F1 0F1>1 0F2 0B0<1 0B0 0B1<1 0B1 0U@1", (K.STRAY, 0, 4, "0F2: there is no such micro-batch")),
    (0, "0F0 0F0>1 1F0 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1 0U@1", (K.STRAY, 0, 2, "1F0: stage 1 belongs to rank 1")),
    (1, "1F0<0 1F0 1F0>0 1B0 1B0>0 1F1<0 1F1 1B1 1B1>0 1U@1", (K.STRAY, 1, 2, "1F0>0: these two exchange no")),
    (0, "0F0 0F0>1.1 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1 0U@1", (K.STRAY, 0, 1, "0F0>1.1: these two exchange no")),
    (1, "1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1>0 1U@1", (K.MISSING, 1, -1, "1B1 is missing")),
    (0, "0F0>1 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1 0U@1", (K.MISSING, 0, -1, "0F0 is missing")),
    (1, "1F0<0 1F0 1I0 1B0>0 1F1<0 1F1 1B1 1B1>0 1U@1", (K.MISSING, 1, -1, "1W0 is missing")),
    (1, "1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B0 1B1 1B1>0 1U@1", (K.DOUBLED, 1, 6, "1B0: occurs a second time")),
    (1, "1F0<0 1F0 1B0 1B0>0 1W0 1F1<0 1F1 1B1 1B1>0 1U@1", (K.DOUBLED, 1, 4, "1W0: a full backward computes this")),
    (0, "0F0 0F0>1 0F1 0F1>1 0F0>1 0B0<1 0B0 0B1<1 0B1 0U@1", (K.DOUBLED, 0, 4, "0F0>1: occurs a second time")),
    (1, "1F0<0 1B0 1F0 1B0>0 1F1<0 1F1 1B1 1B1>0 1U@1", (K.ORDER, 1, 1, "1B0: its forward comes later")),
    (1, "1F0<0 1F0 1W0 1I0 1B0>0 1F1<0 1F1 1B1 1B1>0 1U@1", (K.ORDER, 1, 2, "1W0: its input gradient comes later")),
    (0, "0F0>1 0F0 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1 0U@1", (K.ORDER, 0, 0, "0F0>1: is sent before it is computed")),
    (1, "1F0<0 1F0 1B0 1B0>0 1F1 1F1<0 1B1 1B1>0 1U@1", (K.ORDER, 1, 5, "1F1<0: is received after it was used")),
    (1, "1F0<0 1F0&1B0 1B0>0 1F1<0 1F1 1B1 1B1>0 1U@1", (K.ORDER, 1, 1, "1B0: overlaps the forward it needs")),
    (0, "0F0 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1 0U@1", (K.PARTNER, 0, -1, "0F0>1 is missing; send it")),
    (0, "0F0 0F0>1 0F1 0F1>1 0B0 0B1<1 0B1 0U@1", (K.PARTNER, 0, -1, "0B0<1 is missing; receive it")),
    (0, "0F0 0F0>1 0F1@1 0F1>1 0B0<1 0B0 0B1<1 0B1 0U@1", (K.VERSION, 0, 2, "0F1@1: version 1 does not exist yet")),
    (1, "1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1 1U@1 1B1>0 1U@2", (K.UPDATE, 1, 9, "1U@2: comes before the gradients")),
    (1, "1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1U@1 1B1 1B1>0", (K.UPDATE, 1, 6, "1U@1: comes before the gradients")),
    (1, "1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1 1B1>0 1U@2", (K.UPDATE, 1, 8, "1U@2: makes version 2 where 1 is next")),
    (1, "1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1 1B1>0", (K.UPDATE, 1, -1, "1U@1 is missing")),
    (1, "1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1 1B1>0 1R@1 1U@1", (K.UPDATE, 1, 8, "1R@1: the stage has one replica")),
    (
        0,
        "0F0 0B0<1 0B0 0F0>1 0F1 0F1>1 0B1<1 0B1 0U@1",
        (K.DEADLOCK, 0, 1, "0B0<1: deadlock: waits for rank 1, which is at 1F0<0"),
    ),
]


@pytest.mark.parametrize(("slot", "line", "fault"), DAMAGE, ids=[f"{d[2][0]}-{d[2][3].split(':')[0]}" for d in DAMAGE])
def test_names_the_place(slot: int, line: str, fault: tuple[FaultKind, int, int, str]) -> None:
    lines = [line if at == slot else whole for at, whole in enumerate(LINES)]
    report = check(written(TWO, *lines))
    kind, where, cell, said = fault
    found = the_fault(report, kind, where, cell)
    assert said in found.message
    if cell >= 0:  # drawn below the word
        word = line.split()[cell]
        marks = [part for part in str(report).splitlines() if part.strip() and not part.strip(" ^")]
        assert any(len(mark.strip()) == len(word) for mark in marks)


def test_every_kind_has_its_case() -> None:
    """The two that depend on how transfers work and on memory are tested below."""
    assert {damage[2][0] for damage in DAMAGE} == set(FaultKind) - {FaultKind.CHANNEL, FaultKind.MEMORY}


COMPUTE = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (("0F0 0F1 0B0 0B1 0F1", COMPUTE[1]), (K.DOUBLED, 0, 4, "0F1: occurs a second time")),
        (("0F0 0F1 0B0", COMPUTE[1]), (K.MISSING, 0, -1, "0B1 is missing")),
        ((COMPUTE[0], "1F0 1F1 1B1"), (K.MISSING, 1, -1, "1B0 is missing")),
        ((COMPUTE[0], "1B0 1F0 1F1 1B1"), (K.ORDER, 1, 0, "1B0: its forward comes later")),
        (("0F0 0F1 0B0@1 0B1", COMPUTE[1]), (K.VERSION, 0, 2, "0B0@1: version 1 does not exist yet")),
        (("0F0 0F1 0B0 0B1 1F1", "1F0 1B0 1B1"), (K.STRAY, 0, 4, "1F1: stage 1 belongs to rank 1")),
        (("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), (K.DEADLOCK, 0, 1, "0B0<1: deadlock: waits for rank 1")),
    ],
)
def test_points_into_the_grid_handed_in(lines: tuple[str, str], fault: tuple[FaultKind, int, int, str]) -> None:
    """Compute actions alone: a fault of a transfer that lowering added points at the action it serves."""
    kind, slot, cell, said = fault
    report = check(written(TWO, *lines, lowered=False))
    assert any(f.message.startswith(said) for f in report.faults if (f.kind, f.slot, f.cell) == (kind, slot, cell))


def test_all_faults_at_once() -> None:
    """One of five kinds on two ranks, none hiding another."""
    report = check(
        written(
            TWO,
            "0F0 0F0>1 0F1@3 0F1>1 0B0<1 0B0 0B0 0B1<1 0B1 0U@1",
            "1F0<0 1B0 1F0 1B0>0 1F1<0 1F1 1B1 1U@2 9F0",
        )
    )
    assert {
        (K.VERSION, 0, 2),
        (K.DOUBLED, 0, 6),
        (K.ORDER, 1, 1),
        (K.STRAY, 1, 8),
        (K.UPDATE, 1, 7),
        (K.PARTNER, 1, -1),
    } <= places(report)
    assert len(report.faults) == len(set(report.faults))
    assert str(report).startswith(f"{len(report.faults)} faults in schedule 'two'")
    with pytest.raises(ScheduleError) as raised:
        prove(report.schedule)
    assert set(raised.value.faults) == set(report.faults)


def test_an_empty_schedule_lacks_everything() -> None:
    for lowered in (False, True):
        report = check(written(TWO, "", "", lowered=lowered))
        missing = {fault.message.split()[0] for fault in report.faults if fault.kind is K.MISSING}
        assert missing == {f"{s}{op}{k}" for s in (0, 1) for op in "FB" for k in (0, 1)}


def test_an_overlapped_pair_is_one_cell() -> None:
    """Cells count words: behind an F&B the words go on by one, not by two."""
    good = schedule("dualpipe-v", stages=1, microbatches=3, overlap=True)
    words = good.words()[0]
    assert any("&" in word for word in words)
    report = check(Schedule.of_slots(good.shape, [[*good.actions(0), Action(Op.F, 0, 2)]]))
    assert the_fault(report, K.DOUBLED, 0, len(words)).message.startswith("0F2: ")


def test_an_overlap_without_its_backward() -> None:
    """A forward that should overlap a backward, with another action, or nothing, behind it."""
    shape = Shape("one", Law.SYNC, (0,), 2)
    for tail in ([Action(Op.I, 0, 0), Action(Op.W, 0, 0), Action(Op.B, 0, 1)], []):
        report = check(Schedule.of_slots(shape, [[Action(Op.F, 0, 0), Action(Op.FB, 0, 1), *tail]]))
        assert the_fault(report, K.STRAY, 0, 1).message.startswith("0F1&: overlaps nothing")


TURNS = Shape("turns", Law.STASH, (0,), 1, batches=4, replicas=(2,), sharing=Sharing.TURNS)


def test_replicas_in_turns() -> None:
    """Mini-batch b belongs to replica b mod 2; each round is reduced by both before either updates."""
    good = ("0F0 0B0 0R@1 0U@1 0F2@1 0B2@1 0R@2 0U@2", "0F1 0B1 0R@1 0U@1 0F3@1 0B3@1 0R@2 0U@2")
    assert check(written(TURNS, *good)).ok
    moved = check(written(TURNS, good[0].replace("0F2@1", "0F2@1 0F3@1"), good[1].replace("0F3@1 ", "")))
    assert "replicas take mini-batches in turns" in the_fault(moved, K.STRAY, 0, 5).message
    alone = check(written(TURNS, good[0].replace("0R@1 ", ""), good[1]))
    assert "not reduced over the replicas" in the_fault(alone, K.UPDATE, 0, 2).message
    assert "waits for the other replicas of stage 0" in the_fault(alone, K.DEADLOCK, 1, 7).message


def test_a_gradient_may_not_slip_into_the_round_before() -> None:
    """Gradients add up in one place. Under 2BW mini-batch 1 may use version 0, which is there early enough for its

    backward to run before the update of mini-batch 0: that update would take it along.
    """
    shape = Shape("2bw", Law.TWO_BW, (0,), 2, batches=2)
    good = "0F0 0B0 0F1 0F2 0B1 0U@1 0B2 0F3 0B3 0U@2"
    assert check(written(shape, good)).ok
    slipped = check(written(shape, "0F0 0B0 0F1 0F2 0B2 0B1 0U@1 0F3 0B3 0U@2"))
    assert places(slipped) == {(K.UPDATE, 0, 4)}
    assert slipped.faults[0].message.startswith("0B2: its gradient would go into version 1")
    assert slipped.faults[0].message.endswith("move it after 0U@1")


@pytest.mark.parametrize(
    ("law", "line", "cell", "said"),
    [
        # sync: mini-batch b uses b
        (Law.SYNC, "0F0 0B0 0U@1 0F1 0B1@1 0U@2", 3, "version 0 is already dropped; the law 'sync' asks for 1"),
        # stashing: the backward uses its forward's version, the forward the newest
        (Law.STASH, "0F0 0F1 0B0 0U@1 0B1@1 0U@2", 4, "version 1 breaks the law 'stash', which asks for 0"),
        (Law.STASH, "0F0 0B0 0U@1 0F1 0B1 0U@2", 3, "version 0 breaks the law 'stash', which asks for 1"),
        # newest: one copy, so nothing older than the newest is left
        (Law.NEWEST, "0F0 0F1 0B0 0U@1 0B1 0U@2", 4, "version 0 is already dropped; the law 'newest' asks for 1"),
        # 2bw: a delay of exactly one
        (Law.TWO_BW, "0F0 0B0 0U@1 0F1@1 0B1 0U@2", 3, "version 1 breaks the law '2bw', which asks for 0"),
    ],
)
def test_the_law_of_versions(law: Law, line: str, cell: int, said: str) -> None:
    report = check(written(Shape("one", law, (0,), 1, batches=2), line))
    found = the_fault(report, K.VERSION, 0, cell)
    assert found.message == f"{line.split()[cell]}: {said}"


def test_vertical_sync_follows_the_first_stage() -> None:
    good = schedule("pipedream", stages=2, batches=3, vertical_sync=True)
    assert str(good).splitlines() == ["0F0,0F1,0B0,0F2@1,0B1,0B2@1", "1F0,1B0,1F1,1B1,1F2@1,1B2@1"]
    stashed = Schedule.of_slots(
        good.shape, [list(schedule("pipedream", stages=2, batches=3).actions(slot)) for slot in (0, 1)]
    )
    found = the_fault(check(stashed), K.VERSION, 1, 2)
    assert found.message == "1F1@1: version 1 breaks the law 'vertical', which asks for 0"


def test_a_stray_row_makes_no_update() -> None:
    """Mini-batches 0 to 2 in turns over two replicas: the second has none in the last round, and reduces all the same.

    Given mini-batch 2's backward by mistake, it closed that round twice, past the end of what lowering had reserved.
    """
    shape = Shape("turns", Law.STASH, (0,), 1, batches=3, replicas=(2,), sharing=Sharing.TURNS)
    report = check(written(shape, "0F0 0B0 0F2@1 0B2@1", "0F1 0B1 0B2@1", lowered=False))
    assert places(report) == {(K.STRAY, 1, 2)}


def test_vertical_sync_with_replicas_that_split() -> None:
    """Where replicas split micro-batches, a version is one mini-batch on every stage, whatever the replica counts."""
    shape = Shape("vertical", Law.VERTICAL, (0, 1), 1, batches=3, replicas=(1, 2))
    second = "1F0 1B0 1F1 1B1 1F2@1 1B2@1"
    assert check(written(shape, "0F0 0F1 0B0 0F2@1 0B1 0B2@1", second, second, lowered=False)).ok


# How messages travel.


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_naive_passes_with_sends_that_wait(p: int) -> None:
    assert check(schedule("naive", stages=p, microbatches=4, batches=2), transfers="blocking").ok


def test_1f1b_deadlocks_with_sends_that_wait() -> None:
    """Rank 0 sends its second activation while rank 1 sends its first gradient: each waits for the other to receive."""
    assert check(schedule("1f1b", stages=2, microbatches=4)).ok
    report = check(schedule("1f1b", stages=2, microbatches=4), transfers="blocking")
    assert places(report) == {(K.DEADLOCK, 0, 1), (K.DEADLOCK, 1, 1)}
    said = [fault.message for fault in report.faults]
    assert said == [
        "0F1>1: deadlock: waits for rank 1, which is at 1B0>0",
        "1B0>0: deadlock: waits for rank 0, which is at 0F1>1",
    ]


def test_two_receives_swapped() -> None:
    """Messages with names may be taken in any order; from a line, only the first."""
    swapped = written(
        TWO,
        "0F0 0F0>1 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1 0U@1",
        "1F1<0 1F0<0 1F0 1B0 1B0>0 1F1 1B1 1B1>0 1U@1",
    )
    assert check(swapped).ok
    assert check(written(TWO, *LINES), transfers="in-order").ok
    report = check(swapped, transfers="in-order")
    assert places(report) == {(K.CHANNEL, 1, 0)}
    assert report.faults[0].message.startswith("1F1<0: ")


# Memory.


def test_memory_cap() -> None:
    """p = 4, m = 8: 1F1B keeps at most four activations, GPipe eight: its fifth forward is one too many."""
    assert check(schedule("1f1b", stages=4, microbatches=8), memory=4).ok
    assert not check(schedule("1f1b", stages=4, microbatches=8), memory=3).ok
    report = check(schedule("gpipe", stages=4, microbatches=8), memory=4)
    assert places(report) == {(K.MEMORY, rank, 4) for rank in range(4)}
    for rank, fault in enumerate(report.faults):
        assert fault.message.startswith(f"{rank}F4: memory goes over the cap of 4")
        assert "peak" in fault.message
        assert "8" in fault.message


def test_memory_cap_of_each_slot() -> None:
    """1F1B keeps min(m, p - r): caps of exactly that pass, and one less on rank 2 is found there."""
    one = schedule("1f1b", stages=4, microbatches=8)
    assert check(one, memory=[4, 3, 2, 1]).ok
    report = check(one, memory=[4, 3, 1, 1])
    assert {fault.slot for fault in report.faults} == {2}
    lowered = check(lower(one), memory=[4, 3, 1, 1])
    assert lowered.faults[0].message.startswith("2F1: memory goes over the cap of 1")
    assert lower(one).words()[2][lowered.faults[0].cell] == "2F1"
