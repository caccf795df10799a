"""Workers give the inline engine's bits without a flush too; and where one of them goes wrong, all hear of it."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import async_bits
import pytest
import torch

from ranks import launched

torch.set_num_threads(1)


@functools.cache
def inline(name: str, ranks: int) -> dict:
    return async_bits.run(name, ranks)


def same_as_inline(file: Path, ranks: int) -> None:
    found = json.loads(file.read_text())
    assert len(found) == len(async_bits.cases(ranks))
    wrong = [case for case, made in found.items() if made != inline(case.split(": ", 1)[1], ranks)]
    assert wrong == []


def test_two_ranks_over_shared_memory_and_gloo_then_one_leaves_its_loop_at_another_record(tmp_path):
    with launched(tmp_path, 2, str(tmp_path / "found.json"), "leave", script=async_bits.__file__) as run:
        assert run.wait(300) != 0
    same_as_inline(tmp_path / "found.json", 2)
    words = "expected ranks that end their training loops at the same mini-batch, but got 4 taken in on rank 0 and 5 on"
    ends = rf"rank \d failed.*{words} rank 1; leave the loop"
    assert re.search(rf"{ends}|rank 0 has left its training loop.*, but rank 1 goes on", run.said), run.said


def test_what_throws_one_rank_out_of_its_loop_ends_all_at_once(tmp_path):
    with launched(tmp_path, 2, str(tmp_path / "found.json"), "throw", script=async_bits.__file__) as run:
        assert run.wait(60) != 0  # far below the time that ranks wait for each other
    assert re.search(r"rank 0 failed: KeyError: 'in the body'", run.said), run.said
    assert run.said.index("KeyError") < run.said.index("rank 1 stops"), run.said
    assert run.said.count("Traceback (most recent") == 1, run.said


def test_one_rank_that_breaks_early_is_told_by_the_others(tmp_path):
    with launched(tmp_path, 2, str(tmp_path / "found.json"), "early", script=async_bits.__file__) as run:
        assert run.wait(60) != 0
    assert re.search(r"rank 1 has left its training loop.*, but rank 0 goes on: every rank has to", run.said), run.said


@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_that_breaks_early_is_found_at_once_where_rank_0_has_the_data(tmp_path, who):
    """It gathers, where the others wait to be told whether there is more."""
    with launched(tmp_path, 2, str(tmp_path / "found.json"), f"alone {who}", script=async_bits.__file__) as run:
        assert run.wait(60) != 0  # far below the time that ranks wait for each other
    words = f"rank {who} has left its training loop.*, but rank {1 - who} goes on: "
    if who == 0:
        words += r"rank 0 has come to a gather and rank 1 to a broadcast from rank 0 as collective \d+; "
    assert re.search(f"{words}.*every rank has to leave", run.said), run.said
    assert run.said.count("Traceback (most recent") <= 1, run.said


@pytest.mark.parametrize(("code", "found"), [(3, 3), (0, 1)])
def test_a_layer_that_ends_the_process_gives_the_run_its_code(tmp_path, code, found):
    """But a run that was left amid its training is no success."""
    with launched(tmp_path, 2, str(tmp_path / "found.json"), f"exit {code}", script=async_bits.__file__) as run:
        assert run.wait(60) == found, run.said
    assert re.search(rf"rank 1 failed in 1F.*: SystemExit: {code}", run.said), run.said
    assert run.said.endswith(f"penstock: rank 1 ended with code {found}\n"), run.said


def test_three_ranks_then_a_stage_raises_in_mid_flight(tmp_path):
    with launched(tmp_path, 3, str(tmp_path / "found.json"), "raise", script=async_bits.__file__) as run:
        assert run.wait(300) != 0
    same_as_inline(tmp_path / "found.json", 3)
    place = r"1F\d+(@\d+)? \(stage 1, micro-batch \d+\)"
    assert re.search(rf"rank 1 failed in {place}: ZeroDivisionError: no such luck", run.said), run.said
    assert run.said.count("Traceback (most recent") == 1, run.said


def test_four_ranks(tmp_path):
    with launched(tmp_path, 4, str(tmp_path / "found.json"), script=async_bits.__file__) as run:
        assert run.wait(300) == 0, run.said
    same_as_inline(tmp_path / "found.json", 4)
