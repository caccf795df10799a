"""Training without a flush on real processes: the inline engine's bits, and clear ends."""

from __future__ import annotations

import json
import re

import async_rank
import pytest
import torch

from ranks import launched

torch.set_num_threads(1)
SCRIPT = async_rank.__file__


@pytest.mark.parametrize(("ranks", "transport"), [(2, "shared"), (2, "gloo"), (4, "shared")])
def test_workers_give_the_inline_bits(ranks, transport, tmp_path):
    file = tmp_path / "found.json"
    with launched(tmp_path, ranks, transport, str(file), script=SCRIPT) as run:
        assert run.wait(300) == 0, run.said
    found = json.loads(file.read_text())
    assert len(found) == len(async_rank.KINDS) * len(async_rank.METHODS)
    wrong = [case for case, made in found.items() if made != async_rank.run(*case.split(": "), ranks)]
    assert wrong == []


def test_an_exception_in_mid_flight_names_rank_stage_and_micro_batch(tmp_path):
    with launched(tmp_path, 3, "raising", script=SCRIPT) as run:
        assert run.wait(60) == 1
    place = r"1F\d+@\d+ \(stage 1, micro-batch \d+\)"
    assert re.search(rf"rank 1 failed in {place}: ValueError: no such luck", run.said), run.said
    assert run.said.count("Traceback (most recent") == 1


def test_ranks_that_leave_their_loops_at_different_records(tmp_path):
    with launched(tmp_path, 2, "leaving", script=SCRIPT) as run:
        assert run.wait(60) == 1
    assert re.search(r"wait|ranks that end their training loops at the same mini-batch", run.said), run.said
