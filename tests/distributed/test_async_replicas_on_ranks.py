"""Workers give the inline engine's bits with replicas and without a flush; where one goes wrong, all end and say so."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import async_replicas
import pytest
import torch

from ranks import launched

torch.set_num_threads(1)


def same_as_inline(file: Path, ranks: int) -> None:
    every = [json.loads(Path(f"{file}.{rank}").read_text()) for rank in range(ranks)]
    assert [rank for rank, found in enumerate(every) if found != every[0]] == []
    assert list(every[0]) == async_replicas.cases(ranks)
    inline = {name: json.loads(json.dumps(async_replicas.inline(name))) for name in every[0]}
    assert [name for name in inline if inline[name] != every[0][name]] == []


@pytest.mark.parametrize("ranks", [3, 4])
def test_all_ranks_have_the_bits_of_one_process(tmp_path, ranks):
    file = tmp_path / "found.json"
    with launched(tmp_path, ranks, str(file), script=async_replicas.__file__) as run:
        assert run.wait(400) == 0, run.said
    same_as_inline(file, ranks)


def test_a_replica_that_raises_ends_all(tmp_path):
    with launched(tmp_path, 3, str(tmp_path / "found.json"), "raise", script=async_replicas.__file__) as run:
        assert run.wait(100) != 0  # below the time that ranks wait for each other, and its start
    assert re.search(r"rank 1 failed in 0F5.*: ZeroDivisionError: no such luck", run.said), run.said
    assert run.said.count("Traceback (most recent") == 1, run.said


def test_a_replica_that_dies_ends_those_that_wait_for_its_gradients(tmp_path):
    with launched(tmp_path, 3, str(tmp_path / "found.json"), "die", script=async_replicas.__file__) as run:
        run.begun(3)
        assert run.wait(100) != 0
    assert re.search(r"rank 1 (was killed|died|ended|.*SIGKILL)", run.said), run.said


def test_a_replica_that_leaves_its_loop_later_ends_all(tmp_path):
    began = time.monotonic()
    with launched(tmp_path, 3, str(tmp_path / "found.json"), "leave", script=async_replicas.__file__) as run:
        assert run.wait(100) != 0
    assert time.monotonic() - began < 60, run.said
    words = r"expected ranks that end their training loops at the same mini-batch|has left its training loop"
    assert re.search(words, run.said), run.said
