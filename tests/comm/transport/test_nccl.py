"""Lanes over NCCL. Two ranks cannot share a GPU under NCCL on one host, so each says that it is a host of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed.hosts import Host, Ranks

SCRIPT = str(Path(__file__).with_name("nccl_ranks.py"))


def test_the_module_can_be_imported_without_a_gpu():
    code = "import penstock.comm.transport.nccl, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_everything_arrives_in_any_order_and_behind_slow_work(tmp_path):
    with Ranks() as ranks:
        ranks.start([SCRIPT, str(tmp_path / "store")], [Host(nccl=f"host {rank}") for rank in range(3)])
        ended = ranks.wait(120)
    for rank in ended:
        assert rank.code == 0, rank.error
        assert rank.out.endswith("done\n")
