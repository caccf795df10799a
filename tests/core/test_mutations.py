"""A thousand damaged schedules: each is caught by `check`, or an independent interpreter shows that it does no harm.

The interpreter (symbolic.py) knows nothing of the checker. For a mutant that `check` lets pass it must reach the end
and give the same weights, by the same gradients and versions, as the schedule that was damaged.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from mutate import CASES, MUTATIONS, case, grid_of, mutants
from penstock.core.check import check
from penstock.core.faults import Fault
from penstock.core.lower import lower
from penstock.core.schedule import Schedule
from penstock.schedules.registry import METHODS
from symbolic import Broken, Outcome, Terms, interpret

BLOCKS, EACH = 10, 100
TERMS = Terms()


@cache
def sound(number: int) -> Outcome:
    return interpret(case(number, True), TERMS)


def harmless(number: int, mutant: Schedule) -> bool:
    try:
        return interpret(lower(mutant), TERMS) == sound(number)
    except Broken:
        return False


def drawn(mutant: Schedule) -> str:
    """What was changed, for a message."""
    lines = [" ".join(words) for words in mutant.words()]
    return f"{mutant.shape.name} {'lowered' if mutant.lowered else 'compute'}\n" + "\n".join(lines)


def require_pointed(mutant: Schedule, fault: Fault) -> None:
    """A fault stands in the grid, at the word its message names (or at the compute action that word serves)."""
    words = [str(action) for action in grid_of(mutant)[fault.slot]]
    assert -1 <= fault.cell < len(words), fault
    if mutant.lowered and fault.cell >= 0:
        assert fault.message.split(":")[0] in words[fault.cell], fault


Tally = Counter[tuple[str, str, str]]  # (method, mutation, "caught" or "harmless")


@cache
def block(seed: int, times: int = 1) -> Tally:
    tally: Tally = Counter()
    for number, mutation, _, mutant in mutants(seed, EACH, times):
        report = check(mutant)
        same = harmless(number, mutant)
        assert not report.ok or same, f"{mutation} got past check:\n{drawn(mutant)}"
        for fault in report.faults:
            require_pointed(mutant, fault)
        assert report.ok == str(report).startswith("sound")
        tally[CASES[number][0], mutation, "harmless" if report.ok else "caught"] += 1
        tally["", "", "stricter"] += same and not report.ok
    return tally


@pytest.mark.parametrize("seed", range(BLOCKS))
def test_every_harmful_mutant_is_caught(seed: int) -> None:
    ends = Counter(end for (_, _, end), n in block(seed).items() for _ in range(n))
    assert ends["caught"] + ends["harmless"] == EACH
    assert ends["caught"] >= 60, ends
    assert ends["harmless"] >= 3, ends


@pytest.mark.parametrize("times", [2, 3])
def test_faults_do_not_hide_each_other(times: int) -> None:
    """Two or three mutations at once, some of which undo or mask another."""
    ends = Counter(end for (_, _, end), n in block(100 + times, times).items() for _ in range(n))
    assert ends["caught"] >= 80, ends


def test_the_thousand_are_of_all_kinds() -> None:
    """No method and no mutation stays out, each mutation is caught somewhere, and check is hardly ever too strict."""
    tally: Tally = sum((block(seed) for seed in range(BLOCKS)), Counter())
    stricter = tally.pop(("", "", "stricter"), 0)
    assert tally.total() == BLOCKS * EACH
    assert {method for method, _, _ in tally} == set(METHODS) - {"auto"}
    caught = {mutation for _, mutation, end in tally if end == "caught"}
    spared = {mutation for _, mutation, end in tally if end == "harmless"}
    assert caught == {mutation.__name__ for mutation in MUTATIONS}
    assert {"swap_neighbours", "shift", "backward_in_two", "join", "part", "swap_any"} <= spared
    assert not {"drop", "double", "move_elsewhere", "backward_in_half", "wrong_stage", "wrong_peer"} & spared
    ends = Counter(end for (_, _, end), n in tally.items() for _ in range(n))
    print(f"\n{dict(ends)}, refused though harmless: {stricter}")
    assert stricter <= 10


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_undamaged_pass(number: int) -> None:
    for lowered in (False, True):
        report = check(case(number, lowered))
        assert report.ok, str(report)
    assert sound(number).weights


@pytest.mark.parametrize("seed", range(3))
def test_every_kind_of_transfer(seed: int) -> None:
    """With messages in order, and with sends that wait, check and interpreter agree on who gets through."""
    tally: Counter[tuple[str, bool]] = Counter()
    for *_, mutant in mutants(200 + seed, EACH):
        if not check(mutant).ok:
            continue
        for transfers in ("in-order", "blocking"):
            try:
                interpret(lower(mutant), TERMS, transfers)
                through = True
            except Broken:
                through = False
            assert check(mutant, transfers=transfers).ok == through, f"{transfers}\n{drawn(mutant)}"
            tally[transfers, through] += 1
    assert min(tally["in-order", True], tally["blocking", True], tally["blocking", False]) > 0, tally


@pytest.mark.slow
def test_compiled_laws_find_the_same_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large schedules go through compiled loops, which do not see the end of an array: same faults, same places."""
    damaged = [mutant for *_, mutant in mutants(300, EACH)]
    plain = [check(mutant).faults for mutant in damaged]
    monkeypatch.setattr("penstock.core.jit.COMPILE_FROM", 0)
    assert [check(mutant).faults for mutant in damaged] == plain
