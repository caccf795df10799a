"""Reductions over NCCL. Ranks that share a GPU are refused by it, so each says that it is a host of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from team import Team, here

from distributed.hosts import Host

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_module_can_be_imported_without_a_gpu():
    code = "import penstock.comm.collectives.nccl, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("size", [pytest.param(2, marks=GPU), pytest.param(3, marks=GPU)])
def test_sums_and_parts_behind_slow_work_and_what_is_unlike(size):
    team = Team([Host(nccl=f"host {rank}") for rank in range(size)])
    assert team.ask("on_gpus", tuple(range(size))) == ["as expected"] * size
    said = team.ask("unlike_on_gpus", tuple(range(size)))
    assert said == [said[0]] * size
    assert "as tensor 0 (3,) float32 on rank 0 and (4,) float32 on rank 1" in said[0]
    team.end()


@pytest.mark.parametrize("size", [pytest.param(2, marks=GPU)])
def test_ranks_that_share_a_gpu_are_refused(size):
    team = Team(here(size))
    words = "expected a GPU of its own for each replica of a stage, and NCCL, but got 1 for ranks 0, 1"
    assert all(said.startswith(words) for said in team.ask("opened", (0, 1), "cuda"))
    team.end()


def test_where_there_is_no_gpu_reducers_for_one_are_refused():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    team = Team(here(2))
    words = "expected a GPU of its own for each replica of a stage, and NCCL, but got 0 for ranks 0, 1"
    assert all(said.startswith(words) for said in team.ask("opened", (0, 1), "cuda"))
    team.end()
