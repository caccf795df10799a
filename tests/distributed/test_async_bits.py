"""Workers give the inline engine's bits without a flush too; and where one of them goes wrong, all hear of it."""

from __future__ import annotations

import functools
import json
import re
import time
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
    assert "Traceback" not in run.said, run.said
    assert re.search(r"rank \d", run.said), run.said
    print(run.said)


def test_three_ranks_then_a_stage_raises_in_mid_flight(tmp_path):
    began = time.monotonic()
    with launched(tmp_path, 3, str(tmp_path / "found.json"), "raise", script=async_bits.__file__) as run:
        assert run.wait(300) != 0
    same_as_inline(tmp_path / "found.json", 3)
    assert re.search(
        r"rank 1 failed in 1F\d+(@\d+)? \(stage 1, micro-batch \d+\): ZeroDivisionError: no such luck", run.said
    )
    assert run.said.count("Traceback (most recent") == 1, run.said
    assert time.monotonic() - began < 300


def test_four_ranks(tmp_path):
    with launched(tmp_path, 4, str(tmp_path / "found.json"), script=async_bits.__file__) as run:
        assert run.wait(300) == 0, run.said
    same_as_inline(tmp_path / "found.json", 4)
