"""The high-water mark of a rank's memory: what training takes, and not the pages of files that the kernel maps in."""

from __future__ import annotations

import mmap

import pytest
import torch

from penstock.engine.measure.peak_memory import STATUS, PeakMemory

MIB = 1 << 20


@pytest.mark.skipif(not STATUS.exists(), reason="this system does not tell")
def test_what_is_allocated_counts_and_files_that_are_mapped_do_not(tmp_path):
    file = tmp_path / "library"
    file.write_bytes(bytes(64 * MIB))
    mark = PeakMemory(torch.device("cpu"))
    mark.begin()
    mark.restart()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        assert mark.added() < 16 * MIB
        kept = torch.ones(64 * MIB, dtype=torch.uint8)
        assert 48 * MIB < mark.added() < 80 * MIB
        del kept
    assert mark.added() > 48 * MIB
