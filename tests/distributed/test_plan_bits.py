"""Plans on two real ranks, read from a file by each: uneven cuts, chunks, recompute and offload of single stages."""

from __future__ import annotations

import json

import plan_bits

from ranks import launched


def test_two_ranks_carry_out_a_plan_with_the_inline_bits(tmp_path):
    for case in plan_bits.CASES:
        (tmp_path / f"{case}.json").write_text(json.dumps({"plan": plan_bits.plan(case).to_json()}))
    with launched(tmp_path, 2, str(tmp_path), script=plan_bits.__file__) as run:
        assert run.wait(300) == 0, run.said
    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(2)]
    for case, (_, placement, _) in plan_bits.CASES.items():
        inline = plan_bits.run(plan_bits.plan(case))
        for rank in range(2):
            mine = found[rank][case]
            assert (mine["losses"], mine["mark"]) == (inline["losses"], inline["mark"]), case
            assert mine["forwards"] == {
                str(stage): count for stage, count in inline["forwards"].items() if placement[stage] == rank
            }


def test_ranks_that_were_given_different_plans_are_refused(tmp_path):
    with launched(tmp_path, 2, script=plan_bits.__file__) as run:
        assert run.wait() == 1, run.said
    said = "layers 0 to 2 offloaded, layers 3 to 11 recomputed on rank 0 and layers 0 to 3, layers 4 to 11 recomputed"
    assert f"expected the same plan on every rank, but got {said} on rank 1" in run.said
