"""Proven schedules are remembered, but never more rows of them than was said."""

from __future__ import annotations

from penstock.app.plan.scorer import ProofCache, ScheduleKey


def asked(microbatches, chunks=1):
    name = "interleaved" if chunks > 1 else "1f1b"
    return ScheduleKey(name, 2, microbatches, 1, (1, 1), tuple((s, s + 1) for s in range(2 * chunks - 1)), chunks, ())


def test_what_was_asked_for_longest_ago_is_forgotten_first():
    rows = {m: len(asked(m).prove().schedule) for m in (4, 6, 8)}
    proofs = ProofCache(most=rows[4] + rows[8])
    first, second = proofs.get(asked(4)), proofs.get(asked(6))
    assert proofs.get(asked(4)) is first
    third = proofs.get(asked(8))  # no room for all three
    assert (len(proofs), proofs.rows) == (2, rows[4] + rows[8])
    assert proofs.get(asked(4)) is first
    assert proofs.get(asked(8)) is third
    assert proofs.get(asked(6)) is not second


def test_one_that_is_too_large_is_proven_every_time():
    proofs = ProofCache(most=10)
    assert proofs.get(asked(8)) is not proofs.get(asked(8))
    assert (len(proofs), proofs.rows) == (0, 0)


def test_chunks_are_asked_for():
    assert ProofCache().get(asked(4, chunks=2)).schedule.shape.stages == 4
