"""Plans on real ranks, read from a file by each: uneven cuts, chunks, replicas, devices in any order, recompute and
offload of single stages."""

from __future__ import annotations

import json

import plan_bits
import pytest

from ranks import launched


@pytest.mark.parametrize("cases", [plan_bits.CASES, plan_bits.MOVED], ids=["in order", "moved"])
def test_ranks_carry_out_a_plan_with_the_inline_bits(tmp_path, cases):
    """Process r runs the stages that the plan has on the r-th of its devices."""
    plans = {case: plan_bits.plan(case) for case in cases}
    for case, plan in plans.items():
        (tmp_path / f"{case}.json").write_text(json.dumps({"plan": plan.to_json()}))
    size = len(next(iter(plans.values())).slots)
    with launched(tmp_path, size, str(tmp_path), *cases, script=plan_bits.__file__) as run:
        assert run.wait(300) == 0, run.said
    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(size)]
    for case, plan in plans.items():
        inline = plan_bits.run(plan)
        devices = sorted(device for (device,) in plan.slots)
        for rank, device in enumerate(devices):
            result = found[rank][case]
            assert (result["losses"], result["mark"]) == (inline["losses"], inline["mark"]), case
            assert result["in order"], case
            pipeline_rank = next(at for at, slots in enumerate(plan.devices) if (device,) in slots)
            replica = sorted(plan.devices[pipeline_rank]).index((device,))
            assert result["forwards"] == {
                f"{stage}.{replica}": inline["forwards"][f"{stage}.{replica}"]
                for stage, at in enumerate(plan.placement)
                if at == pipeline_rank
            }


def test_ranks_that_were_given_different_plans_are_refused(tmp_path):
    with launched(tmp_path, 2, script=plan_bits.__file__) as run:
        assert run.wait() == 1, run.said
    said = "layers 0 to 2 offloaded, layers 3 to 11 recomputed on rank 0 and layers 0 to 3, layers 4 to 11 recomputed"
    assert f"expected the same plan on every rank, but got {said} on rank 1" in run.said
